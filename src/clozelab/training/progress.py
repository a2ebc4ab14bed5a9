"""Progress of one cell on a terminal: share of the budget, tokens a second, time left.

The bar is drawn from the row that the module logs, so it costs nothing on the steps between.
"""

import time
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback


class CellProgress(Callback):
    """A rich progress bar on stderr that moves at most five times a second."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._next = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the empty bar."""
        if not trainer.is_global_zero:
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            TextColumn("{task.percentage:5.1f}%"),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("training", total=1.0, speed="")
        self._bar.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Move the bar."""
        if self._bar is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 0.2
        spent = pl_module.spent
        speed = f"{spent.nonpad_tokens / max(spent.seconds, 1e-9):,.0f} tokens/s"
        self._bar.update(self._task, completed=pl_module.budget.progress(spent), speed=speed)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the terminal as it was."""
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the terminal as it was."""
        self._stop()
