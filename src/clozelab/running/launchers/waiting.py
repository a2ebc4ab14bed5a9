"""Following jobs that run elsewhere, from the directories that all machines share."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from clozelab.running.job import Job, Outcome
from clozelab.running.pool import Follow
from clozelab.running.supervise import GRACE_SECONDS

_POLL_SECONDS = 0.5


def wait_for_all(
    jobs: list[Job],
    ended: Callable[[Job], Outcome | None],
    follow: Follow,
    fail_fast: bool,
    cancel: Callable[[Job], None],
) -> list[Outcome]:
    """Ask for each job until all have ended.

    Args:
        ended: the outcome of a job, or None while it waits or runs.
        follow: told when a job has written something for the first time, and when it has ended.
        fail_fast: after the first failure cancel the others.
        cancel: ends a job politely, or takes it out of the queue.

    Raises:
        KeyboardInterrupt: after every job that has not ended was cancelled.
    """
    waiting, started, outcomes = list(jobs), set[Path](), list[Outcome]()
    written = {job.directory: _written(job) for job in jobs}  # by an earlier attempt

    def look() -> bool:
        """Hear of every job that has ended since; whether one has failed."""
        failed = False
        for job in list(waiting):
            if job.directory not in started and _written(job) != written[job.directory]:
                started.add(job.directory)
                follow.start(job)
            if (outcome := ended(job)) is None:
                continue
            if job.directory not in started:
                follow.start(job)
            waiting.remove(job)
            outcomes.append(replace(outcome, job=job))  # it may have gone by another path elsewhere
            follow.end(outcomes[-1])
            failed = failed or outcome.failed
        return failed

    try:
        while waiting:
            if look() and fail_fast:
                break
            follow.tick([job for job in waiting if job.directory in started])
            if waiting:
                time.sleep(_POLL_SECONDS)
    finally:
        for job in waiting:
            cancel(job)
        # Those that run are given the time to keep their state; those that never did are not heard of again.
        deadline = time.monotonic() + GRACE_SECONDS + 5
        waiting[:] = [job for job in waiting if job.directory in started]
        while waiting and time.monotonic() < deadline:
            look()
            time.sleep(_POLL_SECONDS)
    return outcomes


def _written(job: Job) -> int:
    """Bytes of a cell's log, which every attempt adds to."""
    try:
        return (job.directory / "train.log").stat().st_size
    except OSError:
        return 0
