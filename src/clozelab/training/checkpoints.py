"""The newest state of a run, always whole on disk.

Lightning's own ModelCheckpoint counts batches where this project counts optimiser steps, and its writer goes through
the system's temporary folder: another disk, whose room nobody asked about.
"""

import contextlib
import io
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins import TorchCheckpointIO
from pytorch_lightning.callbacks import Callback


class Unsaved(OSError):
    """A checkpoint could not be written; the one before it is as it was."""


class WholeFiles(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it: a kill or a full disk never costs the one before."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write it, to the disk itself.

        Raises:
            Unsaved: no room, or the folder cannot be written.
        """
        place = Path(path)
        part = place.with_suffix(".part")
        buffer = io.BytesIO()  # torch would turn what goes wrong with a file into something unreadable
        torch.save(checkpoint, buffer)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                file.write(buffer.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            part.replace(place)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            kept = "the one before it is kept" if place.exists() else "there is none yet"
            raise Unsaved(
                f"cannot write the checkpoint {place} ({buffer.tell() / 1e6:.1f} MB): {error.strerror or error}; "
                f"{kept}: make room and start the run again"
            ) from error


class Terminated(BaseException):
    """SIGTERM or Ctrl-C: the cell ends as killed and can go on later."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


# Slurm and the supervisor may both pass on one wish to end, a moment apart.
_ONE_WISH_SECONDS = 2.0


@dataclass
class Stop:
    """A wish to end. While a step is computed it waits for the step's end, so that the state can be kept."""

    number: int | None = None
    """the signal that was met while a step was computed"""
    waits: bool = False
    _answers: bool = False
    _met: float = 0.0

    def answer_signals(self) -> None:
        """Answer SIGTERM and Ctrl-C from now on."""
        self._answers = True
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle)

    def answer_again(self) -> None:
        """Take SIGTERM back from Lightning, whose handler talks to other ranks in the middle of whatever they do."""
        if self._answers:
            signal.signal(signal.SIGTERM, self.handle)

    def handle(self, number: int, frame: object = None) -> None:
        """Answer a signal: at the end of the step, or, asked again after a while or between two phases, at once.

        Raises:
            Terminated: at once.
        """
        again = self.number is not None
        if again and time.monotonic() - self._met < _ONE_WISH_SECONDS:
            return
        self.number, self._met = number, time.monotonic()
        if again or not self.waits:
            raise Terminated(number)

    @contextmanager
    def at_the_end_of_a_step(self) -> Iterator[None]:
        """Training: steps are waited for."""
        self.waits = True
        try:
            yield
        finally:
            self.waits = False


class LastCheckpoint(Callback):
    """Keeps `path` at most `every` optimiser steps and about `seconds` seconds old.

    Args:
        path: the one checkpoint file of the run.
        every: optimiser steps between two writes.
        seconds: seconds between two writes.
        stop: a wish to end is met after a write.
    """

    def __init__(self, path: Path, every: int, seconds: float, stop: Stop | None = None) -> None:
        self._path, self._every, self._seconds = path, every, seconds
        self._stop = stop or Stop()
        self._written = time.monotonic()

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Signals are ours to answer, and time is counted from here."""
        self._stop.answer_again()
        self._written = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Write the state when it is time; the final one is written by the cell.

        Raises:
            Terminated: a signal was met while the step was computed; the state is written.
            Unsaved: it could not be.
        """
        late, number = int(time.monotonic() - self._written > self._seconds), self._stop.number or 0
        if trainer.world_size > 1:  # ranks end, and write, after the same step
            wishes = torch.tensor([late, number], device=pl_module.device)
            torch.distributed.all_reduce(wishes, op=torch.distributed.ReduceOp.MAX)
            late, number = map(int, wishes.tolist())
        if late or number or pl_module.spent.steps % self._every == 0:
            self._written = time.monotonic()
            trainer.save_checkpoint(self._path)
        if number:
            raise Terminated(number)
