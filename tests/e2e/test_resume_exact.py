"""A cell that is killed again and again ends with the bits, the history and the one tracked run of one that never was.

Killed means SIGKILL: nothing is written, flushed or said. Every start is a process of its own, forked from one that has
imported everything already (`starter`): a start then costs less than a second.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clozelab.running.compose import compose_run, composer
from clozelab.running.directories import freeze
from tests.e2e.conftest import tiny
from tests.e2e.test_resume_formats import assert_same_bits, history, record_of, state
from tests.e2e.tracked import tracked, tracked_ids

STEPS, KILLS = 24, 5
CASES: dict[str, list[str]] = {
    "dynamic masks, tracked": ["tracker=wandb"],
    "static masks": ["masking=static", "masking.copies=2"],
    "a worker process": ["trainer.num_workers=1"],
    "in pieces": ["trainer.accumulate=2"],
}
# One cell at a time: a line asks for it, its pid is the answer, and its exit code when it has ended.
STARTER = """
import gc, json, os, signal, sys, time
import safetensors.torch, scipy.stats, torch, torch.profiler._cupti_monitor, torch.utils.serialization, wandb
import clozelab.tracking.guarded, clozelab.training.config
from clozelab.evaluation.heldout_mlm import HeldoutMLM
from clozelab.options import discover
from clozelab.training.cell import main
from clozelab.training.module import PretrainingModule

def spoil(asked):
    step, measure = PretrainingModule.training_step, HeldoutMLM.measure

    def training_step(self, batch, index):
        if self.spent.steps == asked.get("killed_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        step(self, batch, index)
        time.sleep(asked.get("pause", 0))
        if "steps" in asked:
            with open(asked["steps"], "a") as file:
                file.write(f"{self.spent.steps}\\n")

    def measured(self, subject):
        batches = subject.batches

        def spoilt(*arguments, **options):
            for batch in batches(*arguments, **options):
                yield batch
                if asked["measuring"] == "kills":
                    os.kill(os.getpid(), signal.SIGKILL)
                open(asked["measuring"], "w").close()
                time.sleep(600)

        subject.batches = spoilt
        return measure(self, subject)

    PretrainingModule.training_step = training_step
    if "measuring" in asked:
        HeldoutMLM.measure = measured

discover()
gc.freeze()
for line in sys.stdin:
    asked = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1), os.dup2(output, 2)
        spoil(asked)
        sys.exit(main(asked["directory"], asked.get("resume", "auto")))
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def cell(directory: Path, overrides: list[str]) -> Path:
    """A run directory of 14 steps with a checkpoint every 4 and a row every 3."""
    often = ["budget.steps=14", "trainer.checkpoint_every=4", "trainer.log_every=3"]
    with composer():
        freeze(directory, compose_run(tiny(*often, *overrides)))
    return directory


class Starter:
    """Starts cells, one at a time."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, directory: Path, **asked: Any) -> int:
        """Start a cell, spoilt as asked; its pid, which is that of its process group."""
        assert self._server.stdin is not None
        output = str(directory.parent / f"{directory.name}.output")
        self._server.stdin.write(json.dumps({"directory": str(directory), "output": output, **asked}) + "\n")
        self._server.stdin.flush()
        return self._answer()

    def end(self) -> int:
        """Wait for the cell to end; its exit code, negative for a signal."""
        return self._answer()

    def run(self, directory: Path, **asked: Any) -> int:
        """Start a cell and wait for its end; its exit code."""
        self.start(directory, **asked)
        return self.end()

    def _answer(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())

    def close(self) -> None:
        """End the process that cells are forked from."""
        self._server.kill()
        self._server.wait()


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """Its cells are started by a program that tracks something itself, as a notebook does."""
    import wandb

    wandb.init(mode="offline", dir=tmp_path_factory.mktemp("own"), settings=wandb.Settings(silent=True)).finish()
    assert "WANDB_SERVICE" in os.environ
    started = Starter()
    yield started
    started.close()


def until(what: Any, seconds: float = 120) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.02)


def assert_equal(whole: Path, parts: Path) -> None:
    """Two finished cells have the same bits, history, counters and scores."""
    one, other = state(whole), state(parts)
    for key in ("state_dict", "optimizer_states", "spent", "window", "cell", "config"):
        if key == "window":  # of which the clock is a part
            one[key].pop("seconds", None), other[key].pop("seconds", None)
        assert_same_bits(one[key], other[key], key)
    assert history(whole) == history(parts)
    records = [record_of(directory) for directory in (whole, parts)]
    budgets = [{k: v for k, v in record.budgets.items() if k != "seconds"} for record in records]
    assert budgets[0] == budgets[1]
    assert records[0].metrics == records[1].metrics
    assert records[0].metrics
    assert records[0].scores == records[1].scores  # a hash
    assert [record.status for record in records] == ["finished", "finished"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_killed_five_times_is_never_having_stopped(tmp_path: Path, starter: Starter, case: str) -> None:
    every = int(np.random.default_rng(len(case)).integers(2, 4))
    settings = ["task=mlm_sop", f"budget.steps={STEPS}", f"trainer.checkpoint_every={every}", *CASES[case]]
    whole, parts = (cell(tmp_path / name, settings) for name in ("whole", "parts"))
    assert starter.run(whole) == 0

    rng = np.random.default_rng(list(CASES).index(case))
    kills = sorted(int(step) for step in rng.choice(np.arange(every, STEPS), KILLS, replace=False))
    ids = set()
    for at in kills:
        assert starter.run(parts, killed_at=at) == -signal.SIGKILL
        assert state(parts)["spent"]["steps"] == at // every * every
        assert not (parts / "record.json").exists()
        ids |= set(tracked_ids(parts))
    assert starter.run(parts) == 0, (parts / "train.log").read_text()

    assert_equal(whole, parts)
    assert state(parts)["spent"]["steps"] == STEPS
    assert [row["step"] for row in history(parts)] == list(range(3, STEPS + 1, 3))
    assert record_of(parts).provenance["resumed_at_step"] == kills[-1] // every * every
    assert "resumed_at_step" not in record_of(whole).provenance
    if "tracker=wandb" in settings:
        assert ids == set(tracked_ids(parts))
        assert len(tracked_ids(parts)) == 1
        rows, code = tracked(parts)
        assert [row["trainer/global_step"] for row in rows if "loss/mlm" in row] == list(range(3, STEPS + 1, 3))
        assert [row["loss/mlm"] for row in rows if "loss/mlm" in row] == [row["loss/mlm"] for row in history(whole)]
        assert code == 0


@pytest.mark.slow
def test_killed_while_measuring_trains_nothing_again(tmp_path: Path, starter: Starter) -> None:
    whole, parts = (cell(tmp_path / name, ["task=mlm_sop", "tracker=wandb"]) for name in ("whole", "parts"))
    steps = tmp_path / "steps"
    assert starter.run(whole) == 0
    assert starter.run(parts, measuring="kills", steps=str(steps)) == -signal.SIGKILL
    trained, ids = steps.read_text(), tracked_ids(parts)
    assert state(parts)["spent"]["steps"] == record_of(whole).budgets["steps"]
    assert starter.run(parts, steps=str(steps)) == 0
    assert steps.read_text() == trained
    assert_equal(whole, parts)
    assert tracked_ids(parts) == ids
    assert len(ids) == 1
    rows, code = tracked(parts)
    assert [row["loss/mlm"] for row in rows if "loss/mlm" in row] == [row["loss/mlm"] for row in history(whole)]
    assert code == 0


@pytest.mark.slow
def test_killed_while_a_checkpoint_is_written(tmp_path: Path, starter: Starter) -> None:
    """What is left of a write that never ended is in nobody's way."""
    whole, parts = (cell(tmp_path / name, ["task=mlm_sop"]) for name in ("whole", "parts"))
    assert starter.run(whole) == 0
    assert starter.run(parts, killed_at=6) == -signal.SIGKILL
    good = parts / "checkpoints" / "last.ckpt"
    good.with_suffix(".part").write_bytes(good.read_bytes()[:1000])
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss/m')
    assert starter.run(parts) == 0
    assert_equal(whole, parts)
    assert os.listdir(parts / "checkpoints") == ["last.ckpt"]
