"""What `clozelab run` shows: a line for every cell that ends, and a bar for every cell that runs."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from clozelab.running.job import Job, Outcome
from clozelab.training.history import last_row

WIDTH = 200


def console_of(stderr: bool = False) -> Console:
    """Where to print: as wide as the terminal; without one so wide that tables keep all they say."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=WIDTH)


class SweepDisplay:
    """Follows a pool through the rows that its cells log.

    Args:
        total: cells to run.
        console: where to draw; bars only on a terminal.
    """

    def __init__(self, total: int, console: Console) -> None:
        self._console = console
        self._total, self._ended = total, 0
        self._tasks: dict[Path, TaskID] = {}
        self._next = 0.0
        self._progress: Any = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:5.1f}%"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> "SweepDisplay":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def start(self, job: Job) -> None:
        """A cell starts."""
        self._tasks[job.directory] = self._progress.add_task(job.name, total=1.0, note="starting")

    def end(self, outcome: Outcome) -> None:
        """A cell ended."""
        self._ended += 1
        if (task := self._tasks.pop(outcome.job.directory, None)) is not None:
            self._progress.remove_task(task)
        minutes, seconds = divmod(round(outcome.seconds), 60)
        head = f"[{self._ended}/{self._total}] {outcome.job.name}"
        if not outcome.failed:
            row = last_row(outcome.job.directory) or {}
            loss = f", training loss {row['loss/mlm']:.3f}" if "loss/mlm" in row else ""
            self._progress.console.print(
                f"{head}: done in {minutes}:{seconds:02d}{loss}", highlight=False, markup=False, soft_wrap=True
            )
        else:
            log = outcome.job.directory / "train.log"
            self._progress.console.print(
                f"{head}: FAILED after {minutes}:{seconds:02d}: {outcome.reason} (log: {log})",
                highlight=False,
                markup=False,
                soft_wrap=True,  # a path that is broken in two is none
                style="red",
            )

    def tick(self, running: list[Job]) -> None:
        """Redraw the bars of what runs, once a second."""
        if not self._console.is_terminal or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 1.0
        for job in running:
            row = last_row(job.directory)
            if row is not None:
                progress = float(row.get("progress", 0.0))
                note = "measuring" if progress >= 1 else _note(row)
                self._progress.update(self._tasks[job.directory], completed=progress, note=note)


def _note(row: dict[str, Any]) -> str:
    """Speed and loss, as far as a row has them: what is logged is the objective's choice."""
    speed = f"{row['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in row else ""
    loss = next((f"loss {row[key]:.3f}" for key in ("loss/mlm", "loss") if isinstance(row.get(key), float)), "")
    return "  ".join(filter(None, (speed, loss)))
