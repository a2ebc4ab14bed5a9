"""The torch side of the data: a loader over steps. The only file of the data code that imports torch."""

import signal
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from clozelab.data.batches import Batch, Batches
from clozelab.data.phases import Phases


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    """The batch as tensors that share its memory."""
    return {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in batch.items()}


def _leave_signals(worker: int) -> None:
    """In a loader process: Ctrl-C and SIGTERM, which a whole process group gets, are the trainer's to answer.

    It still needs batches for the step it is in; the loader processes end with it.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


class Steps(Dataset):
    """Item i is batch `start + i`, or one rank's rows of it."""

    def __init__(self, batches: Batches | Phases, start: int, stop: int, rank: int = 0, world: int = 1) -> None:
        self.batches, self.start, self.stop, self.rank, self.world = batches, start, stop, rank, world

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return tensors(self.batches.batch(self.start + index, self.rank, self.world))


class ClozeData(LightningDataModule):
    """Training batches for Lightning, from `start_step` up to `total_steps`.

    The trainer must have `use_distributed_sampler=False`: ranks part each batch's rows among them here.
    """

    def __init__(
        self,
        batches: Batches | Phases,
        total_steps: int,
        start_step: int = 0,
        workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        self.batches, self.total_steps, self.start_step = batches, total_steps, start_step
        self.workers, self.pin_memory = workers, pin_memory

    def train_dataloader(
        self,
        start_step: int | None = None,
        total_steps: int | None = None,
        rank: int | None = None,
        world: int | None = None,
    ) -> Iterable[dict[str, torch.Tensor]]:
        """Batches `start_step` to `total_steps` - 1; what is not given is as the module and its trainer say.

        Raises:
            ValueError: the ranks cannot part the batch evenly.
        """
        rank = (self.trainer.global_rank if self.trainer else 0) if rank is None else rank
        world = (self.trainer.world_size if self.trainer else 1) if world is None else world
        if self.batches.batch_size % world:
            raise ValueError(f"{world} ranks cannot part a batch of {self.batches.batch_size} sequences evenly")
        steps = Steps(
            self.batches,
            self.start_step if start_step is None else start_step,
            self.total_steps if total_steps is None else total_steps,
            rank,
            world,
        )
        if self.workers == 0 and not self.pin_memory:
            return steps  # a DataLoader would only add its own time to every step
        # batch_size=None: an item is a whole batch already.
        return DataLoader(
            steps,
            batch_size=None,
            shuffle=False,
            num_workers=self.workers,
            pin_memory=self.pin_memory,
            persistent_workers=self.workers > 0,
            worker_init_fn=_leave_signals,
        )
