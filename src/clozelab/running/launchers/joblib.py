"""Tasks of joblib (by default its loky processes), for those who have a joblib backend of their own.

joblib starts its tasks itself: there is no failing fast, and what runs is not seen until it ends. A worker that is
killed takes joblib's pool with it; what had not ended is then given to a new one, and goes on from its checkpoints.
"""

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clozelab.machine import cores
from clozelab.options import option
from clozelab.running.job import Job, Limits, Outcome, outcome_of_lost
from clozelab.running.launcher import LauncherOption
from clozelab.running.pool import Follow, threads_of
from clozelab.running.supervise import environment_of, supervise

_POOLS = 3
"""How many pools may die before what is left counts as failed."""


@option("launcher", "joblib")
@dataclass
class JoblibLauncher(LauncherOption):
    """Cells as tasks of `joblib.Parallel`."""

    slots: int | None = None
    """Cells at a time (joblib's n_jobs); null: one a CPU core."""
    backend: str = "loky"
    """joblib's backend: loky, threading, or one that was registered."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"launcher.slots is {self.slots}; it must be at least 1")
        if self.fail_fast:
            raise ValueError("launcher.fail_fast: joblib starts its tasks itself; use launcher=local")

    def check(self, devices: int) -> None:
        try:
            import joblib  # noqa: F401
        except ImportError:
            raise ValueError("launcher=joblib needs joblib: pip install 'clozelab[joblib]'") from None

    def threads(self, devices: int) -> int:
        return threads_of(self.slots or cores())

    def launch(self, jobs: list[Job], devices: int, follow: Follow) -> list[Outcome]:
        for job in jobs:
            follow.start(job)
        environment = environment_of(self.threads(devices))
        ended: dict[Path, Outcome] = {}
        for _ in range(_POOLS):
            waiting = [job for job in jobs if job.directory not in ended]
            try:
                for outcome in self._pool(waiting, environment):
                    ended[outcome.job.directory] = outcome
                    follow.end(outcome)
            except Exception as error:  # a worker was killed, and joblib gives up its whole pool for that
                lost = " ".join(f"joblib lost its workers: {type(error).__name__}: {error}".split())[:300]
            else:
                break
        for job in jobs:
            if job.directory not in ended:
                ended[job.directory] = outcome_of_lost(job, lost)
                follow.end(ended[job.directory])
        return list(ended.values())

    def _pool(self, jobs: list[Job], environment: dict[str, str]) -> Iterator[Outcome]:
        import joblib

        parallel = joblib.Parallel(
            n_jobs=self.slots or cores(), backend=self.backend, return_as="generator_unordered", batch_size=1
        )
        outcomes: Iterator[Outcome] = parallel(
            joblib.delayed(_supervised)(job, self.limits, environment, os.getpid(), socket.gethostname())
            for job in jobs
        )
        return outcomes


def _supervised(job: Job, limits: Limits, environment: dict[str, str], launcher: int, machine: str) -> Outcome:
    """In a worker: joblib's go on when the process that launched them was killed; on its machine their cells end."""
    ended, stop = threading.Event(), threading.Event()

    def watch() -> None:
        while not ended.wait(1.0):
            if _gone(launcher):
                stop.set()

    if machine == socket.gethostname():
        if _gone(launcher):
            return Outcome(job, 1, 0.0, ["not started: its sweep has ended"])
        threading.Thread(target=watch, daemon=True).start()
    try:
        return supervise(job, limits, environment, stop=stop)
    finally:
        ended.set()


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's, so it is there
        pass
    return False
