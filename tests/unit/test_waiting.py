"""Cells that run elsewhere: how they are followed, and what is said of jobs that Slurm has lost."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from clozelab.running import outcomes
from clozelab.running.job import Job, Outcome
from clozelab.running.launchers import submitit as module
from clozelab.running.launchers.ray import RayLauncher
from clozelab.running.launchers.submitit import Queue, SubmititLauncher
from clozelab.running.launchers.waiting import wait_for_all


class Heard:
    """Keeps what is told of jobs."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[str] = []

    def start(self, job: Job) -> None:
        self.started.append(job.name)

    def end(self, outcome: Outcome) -> None:
        self.ended.append(outcome.job.name)

    def tick(self, running: list[Job]) -> None:
        self.running = [job.name for job in running]


@pytest.fixture
def jobs(tmp_path: Path) -> list[Job]:
    made = [Job(name, tmp_path / name) for name in ("a", "b")]
    for job in made:
        job.directory.mkdir()
    return made


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clozelab.running.launchers.waiting._POLL_SECONDS", 0.01)
    monkeypatch.setattr("clozelab.running.launchers.waiting.GRACE_SECONDS", -4.9)


def test_a_log_of_an_earlier_attempt_is_no_start(jobs: list[Job]) -> None:
    log = jobs[0].directory / "train.log"
    log.write_text("of yesterday\n")
    heard, started = Heard(), []

    def looks() -> Iterator[None]:
        yield
        yield
        started.append(list(heard.started))
        with log.open("a") as file:
            file.write("of today\n")
        yield
        yield
        started.append(list(heard.started))

    look = looks()

    def ended(job: Job) -> Outcome | None:
        if job is jobs[0]:
            return None if next(look, "end") is None else Outcome(job, 0, 1.0, done=True)
        return Outcome(job, 0, 1.0, done=True)

    wait_for_all(jobs, ended, heard, False, lambda job: None)
    assert started == [["b"], ["b", "a"]]
    assert heard.ended == ["b", "a"]


def test_failing_fast_cancels_the_others(jobs: list[Job]) -> None:
    cancelled: list[str] = []
    heard = Heard()

    def ended(job: Job) -> Outcome | None:
        return Outcome(job, 1, 1.0, ["broken"]) if job is jobs[0] else None

    outcomes = wait_for_all(jobs, ended, heard, True, lambda job: cancelled.append(job.name))
    assert [outcome.job.name for outcome in outcomes] == ["a"]
    assert cancelled == ["b"]
    assert heard.ended == ["a"]


def test_an_interrupt_cancels_all_and_hears_of_those_that_ran(jobs: list[Job]) -> None:
    cancelled: list[str] = []
    heard, asked = Heard(), []

    def ended(job: Job) -> Outcome | None:
        asked.append(job.name)
        if len(asked) == 2:
            (job.directory / "train.log").write_text("starts\n")
        if len(asked) == 4:
            raise KeyboardInterrupt
        if job.name in cancelled:
            return Outcome(job, 143, 1.0, ["killed"])
        return None

    with pytest.raises(KeyboardInterrupt):
        wait_for_all(jobs, ended, heard, False, lambda job: cancelled.append(job.name))
    assert cancelled == ["a", "b"]
    assert heard.started == ["b"]
    assert heard.ended == ["b"]


# --- Slurm's queue ----------------------------------------------------------------------------------------------------


class Slurm:
    """A controller whose answer, or silence, a test decides."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._answer, self._now = folder / "answer", 0.0
        program = folder / "squeue"
        program.write_text(f'#!/bin/sh\n[ "$*" = "--noheader --me --array --format=%i" ] && cat {self._answer}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(module.time, "monotonic", lambda: self._now)

    def holds(self, *jobs: str) -> None:
        self._answer.write_text("".join(f"{job}\n" for job in jobs))

    def is_away(self) -> None:
        self._answer.unlink()

    def after(self, seconds: float) -> None:
        self._now += seconds


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(tmp_path, monkeypatch)


def test_a_job_is_lost_when_it_has_long_been_out_of_the_queue(slurm: Slurm) -> None:
    queue = Queue()
    slurm.holds("7_0", "7_1")
    assert not queue.has_lost("7_0")
    slurm.holds("7_1")
    slurm.after(6)
    assert not queue.has_lost("7_0")  # its result may be on its way
    slurm.after(15)
    assert not queue.has_lost("7_0")
    slurm.after(6)
    assert queue.has_lost("7_0")
    assert not queue.has_lost("7_1")


def test_a_job_that_was_put_into_the_queue_again_is_not(slurm: Slurm) -> None:
    queue = Queue()
    slurm.holds()
    assert not queue.has_lost("7_0")
    slurm.holds("7_0")
    slurm.after(6)
    assert not queue.has_lost("7_0")
    slurm.holds()
    slurm.after(19)
    assert not queue.has_lost("7_0")  # counted anew
    slurm.after(21)
    assert queue.has_lost("7_0")


def test_a_controller_that_is_away_says_nothing_about_jobs(slurm: Slurm) -> None:
    queue = Queue()
    slurm.holds()
    assert not queue.has_lost("7_0")
    slurm.is_away()
    slurm.after(1000)
    assert not queue.has_lost("7_0")
    slurm.holds()
    slurm.after(6)
    assert not queue.has_lost("7_0")
    slurm.after(21)
    assert queue.has_lost("7_0")


def test_the_queue_is_asked_for_all_jobs_at_once(slurm: Slurm) -> None:
    queue = Queue()
    slurm.holds("7_0")
    assert not queue.has_lost("7_0")
    slurm.is_away()
    slurm.after(4)
    assert not queue.has_lost("7_1")  # from the same answer
    slurm.after(0.5)
    assert not queue.has_lost("7_0")


@pytest.mark.parametrize("extra", ["{foo: 1}", "{timeout_min: x}"])
def test_a_parameter_that_submitit_does_not_take_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str
) -> None:
    monkeypatch.chdir(tmp_path)
    launcher = SubmititLauncher(cluster="local", extra=yaml.safe_load(extra))
    with pytest.raises(ValueError, match=r"launcher\.extra: submitit does not take it: .*"):
        launcher.check(1)
    SubmititLauncher(cluster="local", extra={"slurm_account": "mine"}).check(1)
    assert not os.listdir(tmp_path)


def test_ray_is_asked_for_nothing_that_no_node_has() -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 2.0}}, {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}]
    RayLauncher(cpus=2)._check_room(nodes)
    for launcher in (RayLauncher(cpus=3), RayLauncher(cpus=1, gpus=1)):
        with pytest.raises(ValueError, match=r"no node of the Ray cluster has .* \(there are: 2 CPUs, 0 GPUs\)"):
            launcher._check_room(nodes)


def test_outcomes_of_an_earlier_sweep_in_the_same_folder_are_not_summed_up(tmp_path: Path) -> None:
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}})
    outcomes.SweepFolder().on_multirun_start(config)
    outcomes.note(tmp_path, Outcome(Job("old", tmp_path / "old"), 1, 1.0, ["broken"]))
    outcomes.SweepFolder().on_multirun_start(config)
    assert outcomes.noted() == []
    outcomes.note(tmp_path, Outcome(Job("new", tmp_path / "new"), 0, 1.0, done=True))
    with (tmp_path / outcomes.OUTCOMES).open("a") as file:
        file.write('{"job": {"na')
    assert outcomes.noted() == [Outcome(Job("new", tmp_path / "new"), 0, 1.0, done=True)]


def test_a_cell_gets_no_fewer_gpus_than_it_wants() -> None:
    with pytest.raises(ValueError, match=r"launcher\.gpus is 1, and a cell wants trainer\.devices=2"):
        SubmititLauncher(cluster="local", gpus=1).check(2)
    SubmititLauncher(cluster="local", gpus=2).check(2)
    SubmititLauncher(cluster="local").check(2)
    with pytest.raises(ValueError, match=r"launcher\.gpus is -1"):
        SubmititLauncher(gpus=-1)
