"""How far the reading of a corpus has come, for whoever waits for it.

On a terminal a line that is kept up to date; elsewhere (a log file, a batch job) a line in the log every half minute.
A small corpus says nothing.
"""

import logging
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.progress

log = logging.getLogger("clozelab")

QUIET = 8 << 20
"""Bytes of text below which nothing is said."""
LOG_SECONDS = 30.0
_SCREEN_SECONDS = 0.25


class Progress:
    """Counts what was done, and says so now and then. To be used in a `with` block.

    Args:
        title: what is being done, for example "corpus wikitext".
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.documents = self.tokens = self.bytes = 0
        """all so far, those of an earlier start too"""
        self.done: float | None = None
        """share of the source read; None: not known"""
        self._begin = self._said = time.monotonic()
        self._before = 0
        self._done_before: float | None = None
        self._first = True
        self._screen: rich.progress.Progress | None = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._screen is not None:
            self._screen.stop()

    def resume(self, documents: int, tokens: int, size: int) -> None:
        """What an earlier start has done already."""
        self.documents, self.tokens, self.bytes, self._before = documents, tokens, size, size

    def add(self, documents: int, tokens: int, size: int, done: float | None) -> None:
        """So many documents, tokens and bytes more; `done` is the share of the source that has now been read."""
        if self._first and self._before:
            # How long the skipping took says nothing about the speed.
            self._done_before, self._begin, self._before, self._first = done, time.monotonic(), self.bytes + size, False
        self.documents += documents
        self.tokens += tokens
        self.bytes += size
        self.done = done
        if self.bytes < QUIET:
            return
        now = time.monotonic()
        if sys.stderr.isatty():
            if self._screen is None or now - self._said >= _SCREEN_SECONDS:
                self._said = now
                self._show()
        elif now - self._said >= LOG_SECONDS:
            self._said = now
            log.info("%s", self.line())

    @property
    def seconds_left(self) -> float | None:
        """By the speed since this start; None where the source has no known end, or nothing can be said yet."""
        if self.done is None:
            return None
        gained = self.done - (self._done_before or 0.0)
        return (time.monotonic() - self._begin) * (1 - self.done) / gained if gained > 0 else None

    def line(self) -> str:
        """All figures in one line."""
        seconds = max(1e-9, time.monotonic() - self._begin)
        parts = [f"{self.documents:,} documents"]
        if self.tokens:
            parts.append(f"{self.tokens:,} tokens")
        parts.append(f"{(self.bytes - self._before) / 1e6 / seconds:.1f} MB/s")
        if self.done is not None:
            parts.append(f"{self.done:.0%} done")
        if (left := self.seconds_left) is not None:
            parts.append(f"{_duration(left)} left")
        return f"{self.title}: {', '.join(parts)}"

    def _show(self) -> None:
        if self._screen is None:
            import rich.console
            import rich.progress

            self._screen = rich.progress.Progress(
                rich.progress.BarColumn(bar_width=20),
                rich.progress.TextColumn("{task.description}", markup=False),
                console=rich.console.Console(stderr=True),
                auto_refresh=False,  # no thread
                transient=True,
            )
            self._screen.add_task("", total=None)
            self._screen.start()
        (task,) = self._screen.task_ids
        self._screen.update(task, description=self.line(), completed=self.done or 0.0)
        self._screen.update(task, total=None if self.done is None else 1.0)
        self._screen.refresh()


def _duration(seconds: float) -> str:
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{hours} h"
