"""Cells of several ranks: in a sweep, in their arithmetic, and when a rank dies."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import TINY
from tests.e2e.test_resume_exact import cell, until
from tests.e2e.test_resume_formats import assert_same_bits, history, record_of, state
from tests.e2e.tracked import tracked, tracked_ids

QUIET = ["model.dropout=0", "model.attention_dropout=0", "task=mlm_sop"]
ENDLESS = "budget.steps=1000000"


def processes(directory: Path) -> dict[int, int]:
    """Pid -> rank of the processes of the cell of a directory."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(directory) not in (entry / "cmdline").read_text().split("\0"):
                continue
            environment = (entry / "environ").read_text(errors="replace").split("\0")
            ranks = [one.partition("=")[2] for one in environment if one.startswith("LOCAL_RANK=")]
            found[int(entry.name)] = int(ranks[0]) if ranks else 0
    return found


def start(directory: Path) -> subprocess.Popen[str]:
    """Start a cell as a process group of its own."""
    command = [sys.executable, "-m", "clozelab.running.child", str(directory)]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def run(directory: Path) -> None:
    process = start(directory)
    _, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Three cells, of which the second has two ranks; they end when they are told to, or by themselves."""
    arguments = ["trainer.devices=1,2,1", "launcher.slots=3", "tracker=wandb", f"runs_dir={tmp_path / 'runs'}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "clozelab.cli", "train", "-m", *TINY, "budget.steps=400", *arguments],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    yield process
    if process.poll() is None:
        process.terminate()
        process.communicate(timeout=60)


def directories(tmp_path: Path) -> list[Path]:
    return sorted(path.parent for path in tmp_path.glob("runs/train/*/config.yaml"))


def with_two_ranks(tmp_path: Path) -> Path:
    (directory,) = (path for path in directories(tmp_path) if "devices: 2" in (path / "config.yaml").read_text())
    return directory


@pytest.mark.slow
def test_a_cell_of_two_ranks_in_a_sweep_is_one_cell(tmp_path: Path, sweep: subprocess.Popen[str]) -> None:
    _, errors = sweep.communicate(timeout=500)
    assert sweep.returncode == 0, errors
    found = directories(tmp_path)
    assert len(found) == len(list(tmp_path.glob("runs/train/*"))) == 3
    assert sorted(os.listdir(tmp_path)) == ["runs"]
    assert [record_of(path).status for path in found] == ["finished"] * 3
    ids = [id_ for path in found for id_ in tracked_ids(path)]
    assert len(ids) == len(set(ids)) == 3
    assert [tracked(path)[1] for path in found] == [0, 0, 0]
    one, other = (history(path) for path in found if path != with_two_ranks(tmp_path))
    assert one == other  # what runs beside it changes nothing


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds a rank by /proc")
def test_a_rank_that_is_killed_ends_its_cell_and_no_other(tmp_path: Path, sweep: subprocess.Popen[str]) -> None:
    until(lambda: len(directories(tmp_path)) == 3, 200)
    directory = with_two_ranks(tmp_path)
    until(lambda: (directory / "metrics.jsonl").exists(), 300)
    (rank,) = (pid for pid, rank in processes(directory).items() if rank == 1)
    os.kill(rank, signal.SIGKILL)
    begin = time.monotonic()
    until(lambda: (directory / "failure.json").exists() and not processes(directory), 60)
    assert time.monotonic() - begin < 60
    _, errors = sweep.communicate(timeout=400)
    assert sweep.returncode == 1
    assert "1 of 3 failed" in errors
    failure = json.loads((directory / "failure.json").read_text())
    assert failure["status"] == "failed"
    # Whichever comes first: the first rank misses it, or Lightning sees it dead and kills the first rank.
    assert "another rank" in failure["reason"] or "SIGKILL" in failure["reason"]
    assert not (directory / "record.json").exists()
    assert tracked(directory)[1] not in (0, None)
    others = [path for path in directories(tmp_path) if path != directory]
    assert [record_of(path).status for path in others] == ["finished"] * 2


@pytest.mark.slow
def test_one_two_and_four_ranks_learn_the_same(tmp_path: Path) -> None:
    """On every row of the log, and in what is measured on a number of examples that no number of ranks divides."""
    settings = [*QUIET, "trainer.log_every=1", "evaluation.heldout_mlm.examples=37"]
    cells = [cell(tmp_path / f"of{n}", [*settings, f"trainer.devices={n}"]) for n in (1, 2, 4)]
    for directory in cells:
        run(directory)
    rows, record = history(cells[0]), record_of(cells[0])
    assert [row["step"] for row in rows] == list(range(1, 15))
    for directory in cells[1:]:
        for row, other in zip(rows, history(directory), strict=True):
            for key in row:
                exact = key.startswith("spent/") or key == "step"
                assert other[key] == (row[key] if exact else pytest.approx(row[key], rel=1e-4, abs=1e-6)), key
        for name, metric in record.metrics.items():
            same = record_of(directory).metrics[name]
            assert same.n == metric.n
            assert same.yardstick == metric.yardstick
            assert same.value == pytest.approx(metric.value, rel=1e-3), name
    assert record.metrics["heldout_mlm.loss"].n > 0


@pytest.mark.slow
def test_two_ranks_stop_after_the_same_step_and_go_on(tmp_path: Path) -> None:
    settings = ["task=mlm_sop", "budget.steps=60", "trainer.devices=2", "trainer.log_every=7"]
    whole, parts = (cell(tmp_path / name, settings) for name in ("whole", "parts"))
    run(whole)
    process = start(parts)
    until(lambda: (parts / "metrics.jsonl").exists())
    process.send_signal(signal.SIGTERM)  # to the first rank alone
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert len([line for line in errors.splitlines() if line.startswith("clozelab: ")]) == 2
    assert not processes(parts)
    assert json.loads((parts / "failure.json").read_text())["status"] == "killed"
    log = (parts / "train.log").read_text()
    assert "rank 1: killed" in log
    assert "failed" not in log  # no rank was left waiting for the other
    stopped = state(parts)["spent"]["steps"]
    assert 7 <= stopped < 60
    run(parts)
    assert record_of(parts).provenance["resumed_at_step"] == stopped
    assert_same_bits(state(whole)["state_dict"], state(parts)["state_dict"])
    assert history(whole) == history(parts)
    assert record_of(whole).metrics == record_of(parts).metrics


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_no_rank_outlives_the_first(tmp_path: Path) -> None:
    directory = cell(tmp_path / "cell", [ENDLESS, "trainer.devices=2"])
    process = start(directory)
    until(lambda: (directory / "metrics.jsonl").exists())
    assert sorted(processes(directory).values()) == [0, 1]
    process.kill()
    process.wait()
    until(lambda: not processes(directory), 10)


@pytest.mark.slow
def test_ranks_agree_on_when_a_time_is_up(tmp_path: Path) -> None:
    directory = cell(tmp_path / "cell", ["trainer.devices=2", "trainer.checkpoint_seconds=0.3"])
    config = yaml.safe_load((directory / "config.yaml").read_text())
    config["budget"] = {"_target_": "clozelab.training.budget.SecondBudget", "seconds": 2.0}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    run(directory)
    assert record_of(directory).status == "finished"
    seconds = record_of(directory).budgets["seconds"]
    assert seconds is not None
    assert seconds >= 2


@pytest.mark.slow
def test_leftovers_of_another_run_make_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    directory = cell(tmp_path / "cell", ["trainer.devices=1"])
    run(directory)
    assert record_of(directory).status == "finished"
