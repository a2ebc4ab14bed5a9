"""The newest state of a run, always whole on disk.

Lightning's own ModelCheckpoint counts batches where this project counts optimiser steps, and writes in place; a kill
while it writes would leave half a file where the only good one was.
"""

import os
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback


def save_checkpoint(trainer: pl.Trainer, path: Path) -> None:
    """Write the trainer's state beside `path` and rename it into place. Every rank must call this."""
    temporary = path.with_suffix(".part")
    trainer.save_checkpoint(temporary)
    if trainer.is_global_zero:
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)


class LastCheckpoint(Callback):
    """Keeps `path` at most `every` optimiser steps and about `seconds` seconds old.

    Args:
        path: the one checkpoint file of the run.
        every: optimiser steps between two writes.
        seconds: seconds between two writes, where one process trains.
    """

    def __init__(self, path: Path, every: int, seconds: float) -> None:
        self._path, self._every, self._seconds = path, every, seconds
        self._written = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Write the state when it is time; the final one is written by the cell."""
        late = trainer.world_size == 1 and time.monotonic() - self._written > self._seconds
        if late or pl_module.spent.steps % self._every == 0:
            self._written = time.monotonic()
            save_checkpoint(trainer, self._path)
