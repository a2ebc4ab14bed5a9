"""One cell in a process group of its own, watched until it ends: the same on every launcher.

    start -> (wall time, memory, a stop asked for) -> exit code -> record, or a cause -> try again, or give up

A cell that dies without a word (killed, out of memory, hung) is told of here: in its `failure.json`, at the end of its
`train.log`, and in its tracked run, which is closed as failed. Its process ends with the process that supervises it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from clozelab.running.directories import RUNNING
from clozelab.running.job import FAILURE, RECORD, Job, Limits, Outcome, cause_of, outcome_of, write_failure

GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_MEMORY_POLL_SECONDS = 0.5
REFUSED = 2
"""Exit code of a cell whose configuration cannot run."""
# A rank's leftovers would make the cell a rank of somebody else's run.
_RANK_VARIABLES = (
    *("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED"),
    # Under Slurm Lightning would take the tasks of the job for its ranks; a cell starts its own.
    *("SLURM_NTASKS", "SLURM_JOB_NAME", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


class Process(Protocol):
    """What of `subprocess.Popen` is used."""

    pid: int

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        ...

    def wait(self, timeout: float) -> int:
        """Exit code; raises `subprocess.TimeoutExpired` if it runs after so many seconds."""
        ...


Starter = Callable[[Path, Mapping[str, str]], Process]


def environment_of(threads: int, gpu: str | None = None) -> dict[str, str]:
    """The environment of a cell that has so many CPU threads, and of all GPUs sees those named."""
    environment = {key: value for key, value in os.environ.items() if key not in _RANK_VARIABLES}
    environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    environment["OPENBLAS_NUM_THREADS"] = "1"  # as in warm processes, which must have no threads
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    return environment


def cold_start(directory: Path, environment: Mapping[str, str]) -> Process:
    """Start the cell of a directory as a fresh interpreter."""
    command = [sys.executable, "-m", "clozelab.running.child", str(directory), str(os.getpid())]
    with (directory / "output.log").open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
            start_new_session=True,
        )


def supervise(
    job: Job,
    limits: Limits,
    environment: Mapping[str, str],
    start: Starter = cold_start,
    stop: threading.Event | None = None,
) -> Outcome:
    """Run a job to its end. Whatever goes wrong with it becomes its outcome: no other job must suffer from it.

    Args:
        job: the cell; a record that is there already is not made again.
        limits: time, memory, attempts.
        environment: of its processes (`environment_of`).
        start: makes the process.
        stop: when set, the cell is asked to end, and made to after a grace period; it is not tried again.
    """
    seconds, causes, attempt = 0.0, list[str](), Attempt(0)
    stop = stop or threading.Event()
    for _ in range(limits.retries + 1):
        begin = time.monotonic()
        try:
            (job.directory / FAILURE).unlink(missing_ok=True)
            attempt = _attempt(job.directory, limits, environment, start, stop)
        except Exception as error:  # no process, no disk, no directory, no configuration that could be read
            if stop.is_set():  # before there was a process: nothing is to be told
                return outcome_of(job, 1, seconds, [*causes, "not started: its sweep has ended"])
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            attempt = Attempt(1, f"its process could not be run: {reason}", told=False)
        seconds += time.monotonic() - begin
        outcome = outcome_of(job, attempt.code, seconds, causes)
        if outcome.done or len(outcome.causes) > len(causes):  # a record that is of no use stays so
            return outcome
        causes.append(attempt.cause)
        if not attempt.told:
            _tell(job.directory, "killed" if stop.is_set() else "failed", attempt.cause)
        if attempt.code == REFUSED or stop.is_set():
            break
    if not attempt.told:  # only now: another attempt would have gone on with the tracked run
        _close_tracked(job.directory)
    return outcome_of(job, attempt.code, seconds, causes)


@dataclass(frozen=True)
class Attempt:
    """How one attempt ended."""

    code: int
    """exit code; negative: a signal"""
    cause: str = ""
    """why it failed, if it did"""
    told: bool = True
    """the cell has written that down, and closed its tracked run, itself"""


def _attempt(
    directory: Path, limits: Limits, environment: Mapping[str, str], start: Starter, stop: threading.Event
) -> Attempt:
    process = start(directory, environment)
    begin, looked, said = time.monotonic(), 0.0, None
    try:
        while (code := _ended(process)) is None:
            now = time.monotonic()
            if stop.is_set():
                _end(process)
            elif limits.seconds is not None and now - begin > limits.seconds:
                said = f"hung or too slow: ended after its time limit of {limits.seconds:g} s"
                _end(process, at_once=True)
            elif limits.bytes is not None and now - looked > _MEMORY_POLL_SECONDS:
                looked = now
                if (used := memory_of(process.pid)) > limits.bytes:
                    said = f"out of memory: {used / 2**30:.2f} GiB, and its limit is {limits.bytes / 2**30:.2f} GiB"
                    _end(process, at_once=True)
    finally:
        if process.poll() is None:  # we are leaving by an exception: interrupted, on a launcher of others
            _end(process)
            tell_of_lost(directory)
        _signal(process, signal.SIGKILL)  # what the cell left behind of its group: ranks, loader processes
    if (directory / RECORD).exists():
        return Attempt(code)
    if said is not None:  # whatever the cell wrote while it was ended, this is why
        return Attempt(code, said, told=False)
    if code == REFUSED and not (directory / FAILURE).exists():
        return Attempt(code, _printed(directory))  # the directory is another process's: nothing is written there
    return Attempt(code, cause_of(directory, code), told=(directory / FAILURE).exists())


def _printed(directory: Path) -> str:
    """The last that a cell had to say before it had a log."""
    with contextlib.suppress(OSError):
        lines = (directory / "output.log").read_text(errors="replace").splitlines()
        for line in reversed(lines):
            if line.startswith("clozelab: "):
                return line.removeprefix("clozelab: ")
    return "refused without a word"


def _tell(directory: Path, status: str, cause: str) -> None:
    """Write a cause down where the cell would have; a directory that cannot be written keeps nobody from going on."""
    with contextlib.suppress(OSError):
        _append_to_log(directory, cause)
        write_failure(directory, status, cause)


def tell_of_lost(directory: Path) -> None:
    """Write down, in place of a cell that was killed together with who supervised it, that it ended with its sweep."""
    if any((directory / name).exists() for name in (RECORD, FAILURE)) or not (directory / RUNNING).exists():
        return
    _close_tracked(directory)
    _tell(directory, "killed", "ended with its sweep")


def _append_to_log(directory: Path, line: str) -> None:
    with (directory / "train.log").open("a") as log:
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')},000 clozelab supervisor: {line}\n")


def _close_tracked(directory: Path) -> None:
    """Close the tracked run of a cell that was ended before it could."""
    if not (directory / "wandb").is_dir():
        return
    command = [sys.executable, "-m", "clozelab.tracking.close", str(directory)]
    with (
        contextlib.suppress(OSError, subprocess.TimeoutExpired),
        (directory / "output.log").open("ab") as output,
    ):
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False, timeout=120)


def memory_of(group: int) -> int:
    """Bytes of the processes of a group, shared ones divided among those that share them (Linux; elsewhere 0)."""
    total = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # After the name, which may hold anything: state, parent, group.
            if int((entry / "stat").read_text().rpartition(")")[2].split()[2]) != group:
                continue
            line = next(line for line in (entry / "smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
            total += int(line.split()[1]) * 1024
    return total


def _ended(process: Process) -> int | None:
    """Exit code, or None if it still runs after a moment."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(_POLL_SECONDS)
    return None


def _end(process: Process, at_once: bool = False) -> None:
    """End a process group: politely, then for good."""
    if not at_once:
        _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while _ended(process) is None and time.monotonic() < deadline:
            pass
    while process.poll() is None:
        _signal(process, signal.SIGKILL)
        _ended(process)


def _signal(process: Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
