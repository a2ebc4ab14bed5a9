"""A cell that is killed and started again ends with the same bits, in every format and under every objective.

Killed means SIGKILL: nothing is written, flushed or said. Each start is a process of its own, as `clozelab run` has it.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clozelab import records
from clozelab.running.compose import compose_run, composer
from clozelab.running.directories import freeze
from clozelab.training.cell import run_cell
from tests.e2e.conftest import tiny

MLM, CLM, REPLACED = (f"evaluation=[{name}]" for name in ("heldout_mlm", "heldout_clm", "heldout_replaced"))
STEPS, CHECKPOINT_EVERY = 14, 4
CASES: dict[str, list[str]] = {
    "packed, spans, a rate that falls": [
        "format=packed", "masking=span", MLM, "masking.rate_law=linear", "masking.rate=0.4", "masking.rate_to=0.1",
        "masking.rate_steps=10",
    ],
    "across documents, left to right": ["format=full_sentences", "masking=causal", CLM],
    "sentence pairs, order, whole words, in pieces": [
        "format=sentence_pair", "task=mlm_sop", "masking=whole_word", "trainer.accumulate=2", MLM,
    ],
    "short, then long": ["lengths=[[0.5,24],[1,48]]", "batch_tokens=300", "task=mlm_nsp", MLM],
    "replaced tokens, order, in pieces": [
        "format=sentence_pair", "task=replaced_tokens", "task.pair=order", "masking=whole_word",
        "trainer.accumulate=2", REPLACED,
    ],
    "replaced tokens, packed, static, a worker process": [
        "format=packed", "task=replaced_tokens", "masking.count=bernoulli", "masking.copies=2",
        "trainer.num_workers=1", REPLACED,
    ],
    "a worker process": [
        "format=packed", "masking.count=bernoulli", "masking.copies=2", "trainer.num_workers=1", MLM,
    ],
}  # fmt: skip
# Dies at the beginning of a step, between two checkpoints and two rows of the log.
KILLED = """
import os, runpy, signal, sys
import clozelab.training.module as module
at, step = int(sys.argv.pop()), module.PretrainingModule.training_step
def training_step(self, batch, index):
    if self.spent.steps == at:
        os.kill(os.getpid(), signal.SIGKILL)
    step(self, batch, index)
module.PretrainingModule.training_step = training_step
runpy.run_module("clozelab.running.child", run_name="__main__")
"""


def cell(directory: Path, overrides: list[str]) -> Path:
    """A run directory of a few steps."""
    often = [f"budget.steps={STEPS}", f"trainer.checkpoint_every={CHECKPOINT_EVERY}", "trainer.log_every=3"]
    with composer():
        freeze(directory, compose_run(tiny(*often, *overrides)))
    return directory


def start(directory: Path, killed_at: int | None = None) -> int:
    """Run the cell in a process of its own; its exit code."""
    how = ["-m", "clozelab.running.child"] if killed_at is None else ["-c", KILLED]
    at = [] if killed_at is None else [str(killed_at)]
    command = [sys.executable, *how, str(directory), *at]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def state(directory: Path) -> dict[str, Any]:
    """The checkpoint without the clock."""
    loaded: dict[str, Any] = torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)
    del loaded["spent"]["seconds"]
    return loaded


def history(directory: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl without the clock."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("tokens_per_second", "spent/seconds")} for row in rows]


def record_of(directory: Path) -> records.Record:
    (record,) = records.read_records(directory / "record.json")
    return record


def assert_same_bits(one: Any, other: Any, where: str = "") -> None:
    """Containers of tensors and numbers, compared to the bit."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same_bits(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for n, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same_bits(a, b, f"{where}[{n}]")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    else:
        assert one == other, where


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_killed_and_started_again_is_never_having_stopped(tmp_path: Path, case: str) -> None:
    whole, parts = (cell(tmp_path / name, CASES[case]) for name in ("whole", "parts"))
    assert run_cell(whole) is not None

    # Each time after a checkpoint; where lengths change, once on either side of the change.
    rng = np.random.default_rng(list(CASES).index(case))
    kills = [int(rng.integers(CHECKPOINT_EVERY + 1, STEPS))]
    if case == "short, then long":
        assert STEPS // 2 > CHECKPOINT_EVERY
        kills = [STEPS // 2, int(rng.integers(2 * CHECKPOINT_EVERY + 1, STEPS))]
    for at in kills:
        assert start(parts, killed_at=at) == -signal.SIGKILL
        assert state(parts)["spent"]["steps"] == at // CHECKPOINT_EVERY * CHECKPOINT_EVERY
        assert not (parts / "record.json").exists()
    assert start(parts) == 0
    assert (parts / "train.log").read_text().count("resuming") == len(kills)

    one, other = state(whole), state(parts)
    for key in ("state_dict", "optimizer_states", "spent", "window"):
        assert_same_bits(one[key], other[key], key)
    assert one["spent"]["steps"] == STEPS
    assert history(whole) == history(parts)
    assert [row["step"] for row in history(whole)] == [3, 6, 9, 12, 14]
    records_ = [record_of(directory) for directory in (whole, parts)]
    budgets = [{k: v for k, v in record.budgets.items() if k != "seconds"} for record in records_]
    assert budgets[0] == budgets[1]
    assert records_[0].metrics == records_[1].metrics
    assert records_[0].metrics
