"""Golden losses: one tiny run per task in fp32 gives the stored losses on any CPU, the same bytes twice on this one.

A change that is meant to alter them brings a new file (`CLOZELAB_WRITE_GOLDEN=1 pytest tests/golden`) and says why.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from clozelab.training.cell import run_cell
from tests.e2e.conftest import make_cell, own_cache

__all__ = ["make_cell", "own_cache"]

GOLDEN = Path(__file__).parent / "losses.json"
TASKS = ("mlm", "mlm_nsp", "mlm_sop", "replaced_tokens")
KEPT = ("step", "loss/mlm", "loss/pair", "loss/replaced", "gradient_norm")


def history(directory: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in KEPT if key in row} for row in rows]


@pytest.mark.parametrize("task", TASKS)
def test_golden_losses(make_cell: Callable[..., Path], task: str) -> None:
    overrides = [f"task={task}", "trainer.log_every=1", "optimizer.lr=3e-3"]
    yardstick = "heldout_replaced" if task == "replaced_tokens" else "heldout_mlm"
    if task == "replaced_tokens":
        overrides += ["evaluation=[heldout_replaced,sentence_pairs]"]
    first, second = make_cell("first", *overrides), make_cell("second", *overrides)
    one, other = run_cell(first), run_cell(second)
    assert one is not None
    assert other is not None
    assert history(first) == history(second)
    assert one.metrics == other.metrics
    found = {
        "history": history(first),
        "loss": one.metrics[f"{yardstick}.loss"].value,
        "nonpad_tokens": one.budgets["nonpad_tokens"],
    }
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("CLOZELAB_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(golden | {task: found}, indent=1, sort_keys=True) + "\n")
        golden = json.loads(GOLDEN.read_text())
    stored = golden[task]
    assert found["nonpad_tokens"] == stored["nonpad_tokens"]
    assert found["loss"] == pytest.approx(stored["loss"], abs=1e-4)
    assert len(found["history"]) == len(stored["history"]) == 12
    for row, expected in zip(found["history"], stored["history"], strict=True):
        assert row == pytest.approx(expected, abs=1e-4)
