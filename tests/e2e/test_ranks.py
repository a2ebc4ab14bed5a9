"""Two ranks train what one process trains: same loss, same gradients, one record, one tracked run."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clozelab.training.cell import run_cell

QUIET = ["model.dropout=0", "model.attention_dropout=0"]
# Of two rows with a target or none each, the ranks have one each.
FEW = ["format=packed", "masking.count=bernoulli", "masking.rate=0.02", "batch_size=2"]
REPLACED = "evaluation=[heldout_replaced]"


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_ranks_equal_one(make_cell: Callable[..., Path], accumulate: int) -> None:
    quiet = [*QUIET, "task=mlm_sop", f"trainer.accumulate={accumulate}"]
    alone, together = make_cell("alone", *quiet), make_cell("together", *quiet, "trainer.devices=2", "tracker=wandb")
    assert_equal(alone, together)
    assert len(list(together.glob("wandb/offline-run-*"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        ["format=full_sentences", "masking=causal", "evaluation=[heldout_clm]"],
        [*FEW, "evaluation=[heldout_mlm]"],
        ["task=replaced_tokens", *FEW, REPLACED],
        # Few steps: the longer two runs part by rounding, the likelier is a draw that falls to either side of a border.
        [
            *("task=replaced_tokens", "task.pair=order", "format=sentence_pair", "masking=span", REPLACED),
            *("trainer.accumulate=2", "budget.steps=4"),
        ],
    ],
    ids=["causal", "few targets", "replaced tokens, few targets", "replaced tokens, order, in pieces"],
)
def test_ranks_with_unequal_numbers_of_targets_equal_one(make_cell: Callable[..., Path], case: list[str]) -> None:
    often = [*QUIET, *case, "trainer.log_every=1"]
    alone, together = make_cell("alone", *often), make_cell("together", *often, "trainer.devices=2")
    spent = assert_equal(alone, together)
    if FEW[-1] in case:
        assert min(b - a for a, b in itertools.pairwise([0, *spent])) <= 1, "one step must leave a rank without targets"


def assert_equal(alone: Path, together: Path) -> list[int]:
    """Run the cell of one process and that of two ranks, and compare them; returns the targets seen at each row."""
    run_cell(alone)
    command = [sys.executable, "-m", "clozelab.running.child", str(together)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    rows, others = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (alone, together)
    )
    assert len(rows) == len(others) > 1
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        for key in row.keys() - {"tokens_per_second", "spent/seconds"}:
            assert other[key] == pytest.approx(row[key], rel=1e-3, abs=1e-4), key
            if key.startswith("spent/"):
                assert other[key] == row[key], key
    weights = [
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for folder in (alone, together)
    ]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=1e-4)
    return [row["spent/targets"] for row in rows]
