"""A pool of slots that runs cells as processes, each in a process group of its own.

A cell's outcome is read from its exit code and its record, never from its output. A failure never stops the others.
When the pool ends, by whatever cause, its cells end: on Linux the kernel ends them with their parent, elsewhere the
pool terminates them.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Job:
    """One cell to run."""

    name: str
    directory: Path
    cell: str | None = None
    """The identity that its record must have; None: any."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    job: Job
    code: int
    seconds: float

    @property
    def done(self) -> bool:
        """The record of this very cell exists."""
        path = self.job.directory / "record.json"
        return path.exists() and self.job.cell in (None, json.loads(path.read_text())["cell"])

    @property
    def reason(self) -> str:
        """Why it is not done, in one line."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            return str(json.loads((self.job.directory / "failure.json").read_text())["reason"])
        if (self.job.directory / "record.json").exists():
            return "its record is of another cell: corpus or configuration changed while it ran"
        if self.code < 0:
            return f"ended by signal {signal.Signals(-self.code).name}"
        return f"exit code {self.code} and no record"


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of(slots: int) -> int:
    """CPU threads of a cell where `slots` of them run at a time."""
    return max(1, cores() // slots)


def run_jobs(
    jobs: list[Job],
    slots: int,
    gpus: list[str] | None = None,
    on_start: Callable[[Job], None] = lambda job: None,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
    on_tick: Callable[[list[Job]], None] = lambda running: None,
) -> list[Outcome]:
    """Run every job, at most `slots` at a time; returns the outcomes in the order in which they ended.

    Args:
        slots: cells at a time; each has cores / slots CPU threads.
        gpus: ids of the GPUs, of which each slot sees one; None leaves what is visible alone.
        on_start, on_end, on_tick: told of each start, each end, and of what runs about once a second.

    Raises:
        KeyboardInterrupt: after every running cell was asked to end (and made to, after a grace period).
    """
    threads = threads_of(slots)
    free = list(range(slots))[::-1]
    waiting, running, outcomes = list(jobs), dict[subprocess.Popen[bytes], tuple[Job, float, int]](), list[Outcome]()
    with _ended_by_signals():
        try:
            while waiting or running:
                while waiting and free:
                    job, slot = waiting.pop(0), free.pop()
                    on_start(job)
                    process = _start(job, threads, gpus[slot] if gpus else None)
                    running[process] = (job, time.monotonic(), slot)
                time.sleep(0.1)
                for process in [p for p in running if p.poll() is not None]:
                    job, begin, slot = running.pop(process)
                    free.append(slot)
                    outcome = Outcome(job, process.returncode, time.monotonic() - begin)
                    outcomes.append(outcome)
                    on_end(outcome)
                on_tick([job for job, _, _ in running.values()])
        finally:
            _stop(list(running))
    return outcomes


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the pool as Ctrl-C does, so that its cells end with it."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(job: Job, threads: int, gpu: str | None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "clozelab.running.child", str(job.directory), str(os.getpid())]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED"):
        environment.pop(name, None)  # a rank's leftovers would make the cell a rank of somebody else's run
    (job.directory / "failure.json").unlink(missing_ok=True)
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
