"""How a cell ends when it is told to, when its loss is not finite, when its disk is full; and how it goes on."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from clozelab.training.cell import run_cell
from tests.e2e.conftest import TINY
from tests.e2e.test_resume_exact import Starter, assert_equal, cell, starter, until
from tests.e2e.test_resume_formats import record_of, state
from tests.e2e.tracked import tracked, tracked_ids

__all__ = ["starter"]

STEPS = 14
CHECKPOINT = Path("checkpoints") / "last.ckpt"


def failure(directory: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((directory / "failure.json").read_text())
    return found


def lines(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def said(directory: Path) -> list[str]:
    """What a cell of the starter printed of its own."""
    output = (directory.parent / f"{directory.name}.output").read_text()
    assert "Traceback" not in output
    return [line for line in output.splitlines() if line.startswith("clozelab: ")]


# --- told to end ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_signal_lets_the_step_end_and_no_step_is_computed_twice(
    tmp_path: Path, starter: Starter, number: signal.Signals, workers: int
) -> None:
    settings = ["task=mlm_sop", f"trainer.num_workers={workers}", "trainer.checkpoint_every=100"]
    settings += [] if workers else ["tracker=wandb"]
    whole, parts = (cell(tmp_path / name, settings) for name in ("whole", "parts"))
    assert starter.run(whole) == 0
    steps = tmp_path / "steps"
    group = starter.start(parts, steps=str(steps), pause=0.3)
    until(lambda: len(lines(steps)) == 5)
    os.killpg(group, number)  # as a terminal does, and whoever supervises a cell
    assert starter.end() == 128 + number
    done = lines(steps)
    assert done == list(range(1, len(done) + 1))
    assert 5 <= len(done) < STEPS
    assert state(parts)["spent"]["steps"] == len(done)
    assert failure(parts)["status"] == "killed"
    assert number.name in failure(parts)["reason"]
    assert not (parts / "record.json").exists()
    first, second = said(parts)
    assert number.name in first
    assert "--resume" in second
    ids = tracked_ids(parts)
    if not workers:
        assert len(ids) == 1
        assert tracked(parts)[1] not in (0, None)

    assert starter.run(parts, steps=str(steps)) == 0
    assert lines(steps) == list(range(1, STEPS + 1))
    assert_equal(whole, parts)
    assert record_of(parts).provenance["resumed_at_step"] == len(done)
    assert tracked_ids(parts) == ids
    assert workers or tracked(parts)[1] == 0
    assert not (parts / "failure.json").exists()


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(tmp_path: Path, starter: Starter) -> None:
    directory = cell(tmp_path / "cell", [])
    pid = starter.start(directory, pause=600)
    until((directory / "running.json").exists)
    time.sleep(3)
    os.kill(pid, signal.SIGTERM)
    time.sleep(3)  # sooner it would count as the same wish
    os.kill(pid, 0)  # still in its step
    begin = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    assert starter.end() == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 30
    assert failure(directory)["status"] == "killed"
    assert not (directory / CHECKPOINT).exists()


@pytest.mark.slow
def test_a_signal_while_it_measures(tmp_path: Path, starter: Starter) -> None:
    whole, parts = (cell(tmp_path / name, ["tracker=wandb"]) for name in ("whole", "parts"))
    assert starter.run(whole) == 0
    pid = starter.start(parts, measuring=str(tmp_path / "measures"))
    until((tmp_path / "measures").exists)
    os.kill(pid, signal.SIGTERM)
    assert starter.end() == 128 + signal.SIGTERM
    assert failure(parts)["status"] == "killed"
    assert tracked(parts)[1] not in (0, None)
    assert starter.run(parts) == 0
    assert_equal(whole, parts)


# --- a loss that is not finite ----------------------------------------------------------------------------------------


def clozelab(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    options = {"CLOZELAB_OPTIONS": "tests.e2e.faults", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-m", "clozelab.cli", *arguments],
        cwd=folder, env=os.environ | options, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_training_and_is_recorded(tmp_path: Path) -> None:
    done = clozelab(tmp_path, "train", *TINY, "schedule=faulty", "schedule.how=nan", "schedule.at=0.5", "tracker=wandb")
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("runs/train/*/record.json")
    record = record_of(path.parent)
    assert record.status == "diverged"
    assert "not finite at step 8" in record.reason  # the first row of the log after it
    assert record.budgets["steps"] == 8
    assert record.metrics == {}
    assert tracked(path.parent)[1] not in (0, None)
    assert not (path.parent / "failure.json").exists()
    before = path.read_bytes()
    assert clozelab(tmp_path, "train", "--resume", str(path.parent)).returncode == 0
    assert path.read_bytes() == before


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None or sys.platform != "linux":
        pytest.skip("no small disk can be mounted here")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("left", [200_000, 0], ids=["no room for a checkpoint", "no room at all"])
def test_a_full_disk_costs_no_checkpoint(tmp_path: Path, small_disk: Path, starter: Starter, left: int) -> None:
    whole = cell(tmp_path / "whole", [])
    parts = cell(small_disk / "parts", [])
    assert starter.run(whole) == 0
    steps, output = tmp_path / "steps", tmp_path / "output"
    starter.start(parts, steps=str(steps), pause=0.3, output=str(output))
    until((parts / CHECKPOINT).exists)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(ballast, ballast.stat().st_size - left)
    assert starter.end() == 1
    ours = [line for line in output.read_text().splitlines() if line.startswith("clozelab: ")]
    assert len(ours) == 1, ours
    assert "No space left" in ours[0]
    assert "Traceback" not in output.read_text()
    if left:
        assert "cannot write the checkpoint" in ours[0]
        assert str(parts / CHECKPOINT) in ours[0]
        assert failure(parts)["status"] == "failed"
    kept = state(parts)["spent"]["steps"]
    assert kept > 0
    assert os.listdir(parts / "checkpoints") == ["last.ckpt"]

    ballast.unlink()
    assert starter.run(parts, output=str(output)) == 0
    assert_equal(whole, parts)
    assert record_of(parts).provenance["resumed_at_step"] == kept


# --- what a run may go on from ----------------------------------------------------------------------------------------


def test_must_wants_a_checkpoint(tmp_path: Path) -> None:
    directory = cell(tmp_path / "cell", [])
    with pytest.raises(ValueError, match=r"holds no checkpoints/last\.ckpt to go on from"):
        run_cell(directory, "must")
    with pytest.raises(ValueError, match="give one of auto, must, never"):
        run_cell(directory, "sometimes")
    assert not (directory / "metrics.jsonl").exists()


@pytest.mark.slow
def test_auto_must_and_never(tmp_path: Path, starter: Starter) -> None:
    whole = cell(tmp_path / "whole", [])
    assert starter.run(whole) == 0
    for resume, started_at in {"auto": 4, "must": 4, "never": None}.items():
        directory = cell(tmp_path / resume, [])
        assert starter.run(directory, killed_at=7) == -signal.SIGKILL
        steps = tmp_path / f"{resume}.steps"
        assert starter.run(directory, resume=resume, steps=str(steps)) == 0
        assert lines(steps) == list(range((started_at or 0) + 1, STEPS + 1))
        assert record_of(directory).provenance.get("resumed_at_step") == started_at
        assert_equal(whole, directory)
        assert len(os.listdir(directory / "checkpoints")) == (2 if resume == "never" else 1)


@pytest.mark.slow
def test_the_command_line_says_what_to_go_on_from(tmp_path: Path, starter: Starter) -> None:
    directory = cell(tmp_path / "cell", [])
    done = clozelab(tmp_path, "train", "--resume", str(directory), "must")
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "no checkpoints/last.ckpt" in line]
    assert starter.run(directory, killed_at=7) == -signal.SIGKILL
    assert clozelab(tmp_path, "train", "--resume", str(directory), "must").returncode == 0
    assert record_of(directory).provenance["resumed_at_step"] == 4

    other = cell(tmp_path / "other", [])
    assert starter.run(other, killed_at=7) == -signal.SIGKILL
    assert clozelab(tmp_path, "train", "--resume", str(other), "never").returncode == 0
    assert "resumed_at_step" not in record_of(other).provenance


@pytest.mark.slow
def test_a_checkpoint_of_another_cell_is_refused_by_name(tmp_path: Path, starter: Starter) -> None:
    directory = cell(tmp_path / "cell", [])
    assert starter.run(directory, killed_at=7) == -signal.SIGKILL
    config = yaml.safe_load((directory / "config.yaml").read_text())
    before = (directory / CHECKPOINT).read_bytes()
    config["optimizer"]["lr"] *= 2
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    assert starter.run(directory) == 2
    (line,) = said(directory)
    assert state(directory)["cell"] in line
    assert "optimizer.lr was" in line
    assert (directory / CHECKPOINT).read_bytes() == before
    # Where and how it runs may change.
    config["optimizer"]["lr"] /= 2
    config["trainer"] |= {"checkpoint_every": 5, "num_workers": 1}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    assert starter.run(directory) == 0


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_read_is_one_line(tmp_path: Path, starter: Starter) -> None:
    directory = cell(tmp_path / "cell", [])
    assert starter.run(directory, killed_at=7) == -signal.SIGKILL
    checkpoint = directory / CHECKPOINT
    checkpoint.write_bytes(checkpoint.read_bytes()[:5000])
    assert starter.run(directory) == 2
    (line,) = said(directory)
    assert str(checkpoint) in line
    assert "never" in line
    assert starter.run(directory, resume="never") == 0


@pytest.mark.slow
def test_a_refused_second_process_says_nothing_of_the_first(tmp_path: Path) -> None:
    directory = cell(tmp_path / "cell", [])
    with FileLock(directory / ".lock"):
        command = [sys.executable, "-m", "clozelab.running.child", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "in use by another process" in done.stderr
    assert not (directory / "failure.json").exists()
