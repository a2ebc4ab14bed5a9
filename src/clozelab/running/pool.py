"""A pool of slots that runs cells as processes, each in a process group of its own.

A cell's outcome is read from its exit code and its record, never from its output. A failure never stops the others.
When the pool ends, by whatever cause, its cells end: on Linux the kernel ends them with their parent, elsewhere the
pool terminates them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Job:
    """One cell to run."""

    name: str
    directory: Path


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    job: Job
    code: int
    seconds: float

    @property
    def done(self) -> bool:
        """The record exists."""
        return (self.job.directory / "record.json").exists()

    @property
    def reason(self) -> str:
        """Why it is not done, in one line."""
        failure = self.job.directory / "failure.json"
        if failure.exists():
            return str(json.loads(failure.read_text())["reason"])
        if self.code < 0:
            return f"ended by signal {signal.Signals(-self.code).name}"
        return f"exit code {self.code} and no record"


def run_jobs(
    jobs: list[Job],
    slots: int,
    threads: int | None = None,
    on_start: Callable[[Job], None] = lambda job: None,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
    on_tick: Callable[[list[Job]], None] = lambda running: None,
) -> list[Outcome]:
    """Run every job, at most `slots` at a time; returns the outcomes in the order in which they ended.

    Args:
        threads: CPU threads of each cell (default: cores / slots).
        on_start, on_end, on_tick: told of each start, each end, and of what runs about once a second.

    Raises:
        KeyboardInterrupt: after every running cell was asked to end (and made to, after a grace period).
    """
    threads = threads or max(1, (os.cpu_count() or 1) // slots)
    waiting, running, outcomes = list(jobs), dict[subprocess.Popen[bytes], tuple[Job, float]](), list[Outcome]()
    try:
        while waiting or running:
            while waiting and len(running) < slots:
                job = waiting.pop(0)
                on_start(job)
                running[_start(job, threads)] = (job, time.monotonic())
            time.sleep(0.1)
            for process in [p for p in running if p.poll() is not None]:
                job, begin = running.pop(process)
                outcome = Outcome(job, process.returncode, time.monotonic() - begin)
                outcomes.append(outcome)
                on_end(outcome)
            on_tick([job for job, _ in running.values()])
    finally:
        _stop(list(running))
    return outcomes


def _start(job: Job, threads: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "clozelab.training.cell", str(job.directory), "--die-with-parent"]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED"):
        environment.pop(name, None)  # a rank's leftovers would make the cell a rank of somebody else's run
    with (job.directory / "output.log").open("ab") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return  # it had already ended
