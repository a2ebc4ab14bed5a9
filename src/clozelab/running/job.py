"""A cell as something to run, and how that went."""

import contextlib
import json
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path

FAILURE = "failure.json"
RECORD = "record.json"


@dataclass(frozen=True)
class Job:
    """One cell to run."""

    name: str
    directory: Path
    cell: str | None = None
    """The identity that its record must have; None: any."""

    @property
    def absolute(self) -> "Job":
        """The same, for a process that may have another working directory."""
        return replace(self, directory=self.directory.absolute())


class CellFailed(RuntimeError):
    """What a sweeper that asked for a result is told of a cell that has none."""


@dataclass(frozen=True)
class Limits:
    """What a cell may take, and how often it may try."""

    seconds: float | None = None
    """Wall time of an attempt."""
    bytes: int | None = None
    """Memory of an attempt's processes together."""
    retries: int = 0
    """Further attempts after one that failed by itself (a refused configuration fails for good)."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended. Plain values: it travels between machines."""

    job: Job
    code: int
    """exit code of the last attempt; negative: the signal that ended it"""
    seconds: float
    """wall time of all attempts"""
    causes: list[str] = field(default_factory=list)
    """why each failed attempt failed, one line each"""
    done: bool = False
    """the record of this very cell exists"""
    diverged: bool = False
    """it says that the loss was not finite"""

    @property
    def failed(self) -> bool:
        """Not done, or done without anything to show."""
        return not self.done or self.diverged

    @property
    def reason(self) -> str:
        """Why it failed, in one line: the last cause, and after several attempts the earlier ones too."""
        if self.diverged:
            return f"diverged: {self.causes[-1]}" if self.causes else "diverged"
        if not self.causes:
            return f"exit code {self.code} and no record"
        if len(self.causes) == 1:
            return self.causes[0]
        if len(set(self.causes)) == 1:
            return f"{self.causes[0]} (in each of {len(self.causes)} attempts)"
        return f"{self.causes[-1]} (attempt {len(self.causes)}; before: {'; '.join(self.causes[:-1])})"


def outcome_of(job: Job, code: int, seconds: float, causes: list[str]) -> Outcome:
    """Read from the job's directory how it ended: the record decides, never the output."""
    path = job.directory / RECORD
    if not path.exists():
        return Outcome(job, code, seconds, causes)
    try:
        record = json.loads(path.read_text())
        cell, status = record["cell"], record["status"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        unreadable = f"{path} cannot be read ({type(error).__name__}); remove it and run this again"
        return Outcome(job, code, seconds, [*causes, unreadable])
    if job.cell not in (None, cell):
        changed = "its record is of another cell: corpus or configuration changed while it ran"
        return Outcome(job, code, seconds, [*causes, changed])
    if status == "diverged":
        return Outcome(job, code, seconds, [*causes, str(record.get("reason", ""))], done=True, diverged=True)
    return Outcome(job, code, seconds, causes, done=True)


def outcome_of_lost(job: Job, reason: str) -> Outcome:
    """Of a job whose supervisor is lost: done if its record is there, else failed for this reason."""
    found = outcome_of(job, 1, 0.0, [])
    return found if found.done else outcome_of(job, 1, 0.0, [reason])


def cause_of(directory: Path, code: int) -> str:
    """Why an attempt failed: as the cell said, or by the way in which it ended."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(json.loads((directory / FAILURE).read_text())["reason"])
    if code < 0:
        with contextlib.suppress(ValueError):  # real-time signals have no name of their own
            return f"ended by signal {signal.Signals(-code).name}"
        return f"ended by signal {-code}"
    return f"exit code {code} and no record"


def write_failure(directory: Path, status: str, reason: str) -> None:
    """Leave word of an end that the cell could not tell of itself."""
    (directory / FAILURE).write_text(failure_text(directory, status, reason))


def failure_text(directory: Path, status: str, reason: str) -> str:
    """What a failure file holds."""
    return json.dumps({"status": status, "reason": reason, "log": str(directory / "train.log")}) + "\n"
