"""One cell, from its frozen configuration to its record."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from clozelab import records
from clozelab.training.cell import run_cell

MakeCell = Callable[..., Path]


def rows(directory: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("tokens_per_second", "spent/seconds")} for row in lines]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    loaded = torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)
    return dict(loaded["state_dict"])


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_a_cell_leaves_everything_behind(make_cell: MakeCell) -> None:
    directory = make_cell("cell", "task=mlm_sop", "tracker=wandb")
    record = run_cell(directory)
    assert record is not None
    assert [record] == records.read_records(directory / "record.json")
    assert record.status == "finished"
    assert record.budgets["steps"] == 12
    assert record.budgets["nonpad_tokens"] <= record.budgets["tokens"] == 12 * 8 * 48
    assert {"heldout_mlm.loss", "pairs.sop.own", "pairs.nsp.probe", "pairs.sop.probe"} <= record.metrics.keys()
    assert "pairs.nsp.own" not in record.metrics
    assert [row["step"] for row in rows(directory)] == [4, 8, 12]
    scores = records.read_scores(directory / "scores.npz", record.scores.sha256 if record.scores else None)
    total = scores["heldout_mlm.loss"].sum(axis=0)
    assert total[0] / total[1] == pytest.approx(record.metrics["heldout_mlm.loss"].value)
    assert len(list((directory / "wandb").glob("offline-run-*"))) == 1
    assert (directory / "checkpoints" / "last.ckpt").exists()


def test_only_the_head_of_the_task_is_built(make_cell: MakeCell) -> None:
    record = run_cell(make_cell("mlm", "task=mlm"))
    assert record is not None
    assert not any(name.endswith(".own") for name in record.metrics)


@pytest.mark.parametrize("variation", [[], ["trainer.accumulate=2"], ["masking=static", "masking.copies=2"]])
def test_going_on_equals_never_having_stopped(make_cell: MakeCell, variation: list[str]) -> None:
    whole = make_cell("whole", "task=mlm_sop", "trainer.checkpoint_every=5", *variation)
    run_cell(whole)
    parts = make_cell("parts", "task=mlm_sop", "trainer.checkpoint_every=5", *variation)
    killer = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "import clozelab.training.module as m\n"
        "from clozelab.training.cell import run_cell\n"
        "step = m.PretrainingModule.training_step\n"
        "def dying(self, batch, i):\n"
        "    if self.spent.steps == 8: os._exit(9)\n"
        "    step(self, batch, i)\n"
        "m.PretrainingModule.training_step = dying\n"
        "run_cell(Path(sys.argv[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", killer, str(parts)], check=False).returncode == 9
    assert not (parts / "record.json").exists()
    run_cell(parts)
    assert_same(weights(whole), weights(parts))
    assert rows(whole) == rows(parts)


def test_accumulation_and_workers_change_nothing(make_cell: MakeCell) -> None:
    quiet = ["model.dropout=0", "model.attention_dropout=0", "task=mlm_sop"]
    run_cell(make_cell("one", *quiet))
    run_cell(make_cell("four", *quiet, "trainer.accumulate=4"))
    run_cell(make_cell("workers", *quiet, "trainer.num_workers=2"))
    base = make_cell("one", *quiet)
    assert_same(weights(base), weights(base.parent / "workers"))
    for name, value in weights(base).items():
        torch.testing.assert_close(weights(base.parent / "four")[name], value, rtol=1e-3, atol=1e-4)


def test_a_diverged_cell_is_recorded_not_dropped(make_cell: MakeCell) -> None:
    record = run_cell(make_cell("wild", "optimizer.lr=1e30", "optimizer.clip=0", "schedule.warmup=0"))
    assert record is not None
    assert record.status == "diverged"
    assert "not finite" in record.reason
    assert record.metrics == {}


def test_same_seed_same_start_in_every_arm(make_cell: MakeCell) -> None:
    starts = {}
    for task in ("mlm", "mlm_nsp", "mlm_sop"):
        directory = make_cell(task, f"task={task}", "budget.steps=1", "optimizer.lr=1e-30")
        run_cell(directory)
        starts[task] = weights(directory)
    for name, value in starts["mlm"].items():
        assert torch.equal(value, starts["mlm_nsp"][name]), name
        assert torch.equal(value, starts["mlm_sop"][name]), name


def test_a_cell_that_is_done_is_left_alone(make_cell: MakeCell) -> None:
    directory = make_cell("done")
    record = run_cell(directory)
    before = (directory / "record.json").read_bytes(), (directory / "record.json").stat().st_mtime_ns
    assert run_cell(directory) == record
    assert before == ((directory / "record.json").read_bytes(), (directory / "record.json").stat().st_mtime_ns)
    other = make_cell("done", "seed=1")
    assert other == directory
    with pytest.raises(ValueError, match="holds the record of cell"):
        run_cell(directory)


def test_one_process_at_a_time_in_a_directory(make_cell: MakeCell) -> None:
    directory = make_cell("held")
    with FileLock(directory / ".lock"), pytest.raises(ValueError, match="in use by another process"):
        run_cell(directory)


def test_sigterm_ends_a_cell_as_killed_and_it_goes_on(make_cell: MakeCell) -> None:
    directory = make_cell("stopped", "budget.steps=100000", "trainer.checkpoint_every=5")
    process = subprocess.Popen([sys.executable, "-m", "clozelab.running.child", str(directory)], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (directory / "checkpoints" / "last.ckpt").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert b"--resume" in errors
    assert json.loads((directory / "failure.json").read_text())["status"] == "killed"
    assert not (directory / "record.json").exists()
