"""A pool of slots on this machine that runs cells as processes, each in a process group of its own.

A failure never stops the others, unless the pool is told to fail fast. When the pool ends, by whatever cause, its cells
end: on Linux the kernel ends them with their parent, elsewhere the pool terminates them.
"""

import contextlib
import logging
import queue
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import yaml

from clozelab.machine import cores
from clozelab.running.directories import read_frozen
from clozelab.running.job import Job, Limits, Outcome
from clozelab.running.supervise import Process, Starter, cold_start, environment_of, supervise
from clozelab.running.warm import WarmServer, needed_by

log = logging.getLogger(__name__)


class Interrupted(KeyboardInterrupt):
    """A signal has ended a sweep: Ctrl-C, or what ends it like Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Follow(Protocol):
    """Who is told of what happens to jobs, always from the thread that launched them."""

    def start(self, job: Job) -> None:
        """A job starts."""

    def end(self, outcome: Outcome) -> None:
        """A job has ended."""

    def tick(self, running: list[Job]) -> None:
        """What runs; told several times a second."""


class Silent:
    """Tells nobody."""

    def start(self, job: Job) -> None:
        """Nothing."""

    def end(self, outcome: Outcome) -> None:
        """Nothing."""

    def tick(self, running: list[Job]) -> None:
        """Nothing."""


def threads_of(slots: int) -> int:
    """CPU threads of a cell where `slots` of them run at a time."""
    return max(1, cores() // slots)


def run_jobs(
    jobs: list[Job],
    slots: int,
    gpus: list[str] | None = None,
    limits: Limits | None = None,
    fail_fast: bool = False,
    warm: bool = False,
    follow: Follow | None = None,
) -> list[Outcome]:
    """Run every job, at most `slots` at a time; returns the outcomes in the order in which they ended.

    Args:
        slots: cells at a time; each has cores / slots CPU threads.
        gpus: ids of the GPUs, of which each slot sees one; None leaves what is visible alone.
        limits: of each cell.
        fail_fast: after the first failure start nothing more, and end what runs.
        warm: fork cells from a process that has imported everything already.
        follow: told of each start and end.

    Raises:
        Interrupted: after every running cell was asked to end (and made to, after a grace period).
    """
    follow, limits, stop = follow or Silent(), limits or Limits(), threading.Event()
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    news: queue.SimpleQueue[Job | Outcome | BaseException] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)

    def work(slot: int, start: Starter) -> None:
        environment = environment_of(threads_of(slots), gpus[slot] if gpus else None)
        try:
            while not stop.is_set():
                try:
                    job = waiting.get_nowait()
                except queue.Empty:
                    return
                news.put(job)
                outcome = supervise(job, limits, environment, start, stop)
                if fail_fast and outcome.failed:  # here: the next job would be taken before others hear of it
                    stop.set()
                news.put(outcome)
        except BaseException as error:  # told to the thread that waits for news
            news.put(error)

    starting = _warm_start(jobs, slots, stop) if warm and len(jobs) > 1 else contextlib.nullcontext(cold_start)
    outcomes: list[Outcome] = []
    running: dict[str, Job] = {}
    with ended_by_signals(), starting as start:
        workers = [
            threading.Thread(target=work, args=(slot, start), daemon=True) for slot in range(min(slots, len(jobs)))
        ]
        try:
            for worker in workers:
                worker.start()
            while any(worker.is_alive() for worker in workers) or not news.empty():
                with contextlib.suppress(queue.Empty):
                    item = news.get(timeout=0.1)
                    if isinstance(item, BaseException):
                        raise item
                    if isinstance(item, Job):
                        running[str(item.directory)] = item
                        follow.start(item)
                    else:
                        running.pop(str(item.job.directory))
                        outcomes.append(item)
                        follow.end(item)
                follow.tick(list(running.values()))
        finally:
            stop.set()
            for worker in workers:
                while worker.is_alive():
                    worker.join(0.1)
    return outcomes


@contextlib.contextmanager
def _warm_start(jobs: list[Job], slots: int, stop: threading.Event) -> Iterator[Starter]:
    """From a warm process while there is one; several ranks replay their command, and need a fresh interpreter.

    The first cells of all slots wait for it: those that import for themselves meanwhile end later, and slow it down.
    """
    untold = threading.Lock()

    def start(directory: Path, environment: Mapping[str, str]) -> Process:
        (directory / "output.log").open("ab").close()  # a fork that cannot write there could not say so
        if not server.gone and _devices(directory) == 1:
            try:
                return server.start(directory, environment, stop)
            except OSError as error:
                if stop.is_set():
                    raise
                if untold.acquire(blocking=False):  # by the first slot that meets it
                    log.warning("cells start as fresh interpreters, and slower: %s", error)
        return cold_start(directory, environment)

    modules = needed_by(job.directory for job in jobs)
    with contextlib.closing(WarmServer(environment_of(threads_of(slots)), modules)) as server:
        yield start


def _devices(directory: Path) -> int:
    try:
        return int(read_frozen(directory)["trainer"]["devices"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return 1  # no configuration that could run: the cell will say what is wrong, and stop no other


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a sweep as Ctrl-C does, so that its cells end with it.

    Raises:
        Interrupted: one of the three was met; knows its number.
    """

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # One that is ignored stays so: that is how `nohup` and shells keep a sweep in the background running.
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
