"""What has become of the cells of a run tree: read from their directories alone, so it works while a sweep runs, on any
launcher, and from any machine that sees the directories."""

import contextlib
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clozelab.running.directories import RUNNING, started
from clozelab.running.job import FAILURE, RECORD
from clozelab.training.history import last_row

# A cell of another machine that has written nothing for so long is said to be silent: its process cannot be asked.
SILENT_SECONDS = 600.0


@dataclass(frozen=True)
class CellState:
    """One cell as its directory shows it."""

    state: str
    """done, diverged, running, silent, failed, waiting"""
    progress: float = 0.0
    """share of its budget"""
    tokens_per_second: float | None = None
    left: float | None = None
    """seconds until its budget is spent, at the pace so far"""
    seconds: float | None = None
    """of training, of a cell that has ended"""
    reason: str = ""
    """why it failed"""


def cell_state(directory: Path, cell: str | None = None) -> CellState:
    """The state of the cell of a directory.

    Args:
        cell: the identity that a record must have.
    """
    record = _read(directory / RECORD, cell=str, status=str, budgets=dict)
    if record is not None and cell in (None, record["cell"]):
        seconds = _number(record["budgets"].get("seconds"))
        if record["status"] == "diverged":
            return CellState("diverged", 1.0, seconds=seconds, reason=str(record.get("reason", "")))
        return CellState("done", 1.0, seconds=seconds)
    row = last_row(directory) or {}
    progress = _number(row.get("progress")) or 0.0
    process = _read(directory / RUNNING, host=str, pid=int, since=float)
    failure = _read(directory / FAILURE)
    if failure is not None:
        return CellState("failed", progress, reason=str(failure.get("reason", "")))
    if process is None:
        return CellState("waiting", progress)
    pace = _number(row.get("tokens_per_second"))
    spent = _number(row.get("spent/seconds")) or 0.0
    left = spent / progress * (1 - progress) if progress > 0 else None
    alive = _alive(directory, process)
    if alive is None or alive:
        return CellState("running" if alive else "silent", progress, pace, left)
    return CellState("failed", progress, reason="its process is gone; run the sweep again to go on")


def _alive(directory: Path, process: dict[str, Any]) -> bool | None:
    """Whether the process of a cell runs; None: it is on another machine and has been silent for long."""
    if process["host"] == socket.gethostname():
        if process.get("started") is not None:
            # A number may have come round to another process since.
            return started(int(process["pid"])) == str(process["started"])
        with contextlib.suppress(OSError):
            os.kill(int(process["pid"]), 0)
            return True
        return False
    written = max((path.stat().st_mtime for path in directory.glob("*.jsonl")), default=float(process["since"]))
    return True if time.time() - max(written, float(process["since"])) < SILENT_SECONDS else None


def _read(path: Path, **kinds: type) -> dict[str, Any] | None:
    """An object with values of these kinds, or None: a file that is not there, or not whole."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in kinds.items()):
            return found
    return None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
