"""Run the cells of a sweep on a launcher, show how it goes, and sum up what failed."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console

from clozelab.options import build
from clozelab.running.display import SweepDisplay
from clozelab.running.job import Job, Outcome, outcome_of
from clozelab.running.launcher import LauncherOption
from clozelab.running.pool import ended_by_signals
from clozelab.running.states import cell_state
from clozelab.running.supervise import GRACE_SECONDS, tell_of_lost


def launcher_of(node: Any, devices: int) -> LauncherOption:
    """The launcher that a configuration chooses, checked.

    Args:
        node: of the group `launcher`.
        devices: the most that a cell wants.

    Raises:
        ValueError: an impossible setting, or nothing here to launch with.
    """
    launcher = build(node)
    assert isinstance(launcher, LauncherOption)
    launcher.check(devices)
    return launcher


def run_sweep(jobs: list[Job], launcher: LauncherOption, devices: int) -> list[Outcome]:
    """Run jobs under the display, and name the failed ones, with the cause and the log of each, at the end.

    Raises:
        Interrupted: by a signal, after the running cells were ended; how many are done is said before.
    """
    console = Console(stderr=True, soft_wrap=True)
    try:
        with ended_by_signals(), SweepDisplay(len(jobs), console) as display:
            outcomes = launcher.launch(jobs, devices, display)
    except KeyboardInterrupt:
        _tell_of_lost(jobs)
        ended = [outcome_of(job, 0, 0.0, []) for job in jobs]
        done = sum(outcome.done for outcome in ended)
        _say(console, f"interrupted: {done} of {len(jobs)} done; run the same again to go on")
        raise
    sum_up(outcomes, len(jobs), console)
    known = {outcome.job.directory for outcome in outcomes}
    if left := [job for job in jobs if job.directory not in known]:
        _say(console, f"{len(left)} not run: {', '.join(job.name for job in left)}")
    return outcomes


def _tell_of_lost(jobs: list[Job]) -> None:
    """Of cells of this machine that were killed without a word: a launcher's workers may have ended with theirs."""
    deadline = time.monotonic() + GRACE_SECONDS
    running = [job.directory for job in jobs]
    while running and time.monotonic() < deadline:
        running = [directory for directory in running if cell_state(directory).state == "running"]
        time.sleep(0.1)
    for job in jobs:
        if job.directory not in running and cell_state(job.directory).state == "failed":
            tell_of_lost(job.directory)


def sum_up(outcomes: list[Outcome], total: int, console: Console) -> None:
    """Name the cells of a sweep that failed, and those that did before they finished, with every cause."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    again = [outcome for outcome in outcomes if not outcome.failed and outcome.causes]
    if again:
        _say(console, f"{len(again)} of {total} done after a failed attempt:")
        for outcome in again:
            _say(console, f"  {outcome.job.name}: {'; '.join(outcome.causes)}")
    if failed:
        console.print(f"{len(failed)} of {total} failed:", style="red", highlight=False)
        for outcome in failed:
            _say(console, f"  {outcome.job.name}: {outcome.reason}")
            _say(console, f"      log: {_log(outcome.job.directory)}")


def _say(console: Console, line: str) -> None:
    """One line, as it is: nothing in it is coloured, taken for markup, or broken (logs are searched line by line)."""
    console.print(line, highlight=False, markup=False)


def _log(directory: Path) -> Path:
    """Where to read on: what the cell logged, or what its process printed if it never came to that."""
    return directory / ("train.log" if (directory / "train.log").exists() else "output.log")
