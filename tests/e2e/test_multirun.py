"""`clozelab train -m`: every job of an ordinary Hydra sweep is a process with a directory of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from clozelab import records
from tests.e2e.conftest import TINY


def train(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clozelab.cli", "train", "-m", *TINY, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)


@pytest.mark.slow
def test_a_sweep_makes_one_directory_and_one_tracked_run_a_job(tmp_path: Path) -> None:
    done = train(tmp_path, "seed=0,1", "tracker=wandb")
    assert done.returncode == 0, done.stderr
    found = [records.read_records(path)[0] for path in sorted(tmp_path.glob("runs/train/*/record.json"))]
    assert sorted(record.seed for record in found) == [0, 1]
    tracked = list(tmp_path.glob("runs/train/*/wandb/offline-run-*"))
    assert len({path.parts[-3] for path in tracked}) == len(tracked) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_wrong_job_refuses_the_whole_sweep(tmp_path: Path) -> None:
    done = train(tmp_path, "batch_size=8,0")
    assert done.returncode == 2
    assert "batch_size is 0" in done.stderr
    assert not (tmp_path / "runs" / "train").exists()


@pytest.mark.parametrize("override", ["model.hiden=64", "model.hiden=32,64"])
def test_an_unknown_key_is_refused_with_the_one_that_was_meant(tmp_path: Path, override: str) -> None:
    done = train(tmp_path, override)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "did you mean model.hidden?" in line


def test_an_objective_that_no_yardstick_gives_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done = train(tmp_path, "seed=0,1", "objective=heldout_mlm.los")
    assert done.returncode == 2
    assert "objective=heldout_mlm.los is no metric of this run; it will have heldout_mlm.loss" in done.stderr
    assert not list(tmp_path.glob("runs/train/*"))


def test_sweeping_the_launcher_is_refused(tmp_path: Path) -> None:
    done = train(tmp_path, "hydra/launcher=local_processes,basic")
    assert done.returncode != 0
    assert not list(tmp_path.glob("runs/train/*/record.json"))
