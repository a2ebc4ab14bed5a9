"""This machine: a pool of slots, each with its CPU threads or its GPUs."""

import os
from dataclasses import dataclass

from clozelab.machine import cores
from clozelab.options import option
from clozelab.running.job import Job, Outcome
from clozelab.running.launcher import LauncherOption
from clozelab.running.pool import Follow, run_jobs, threads_of


@option("launcher", "local")
@dataclass
class LocalLauncher(LauncherOption):
    """Cells of this machine, several at a time."""

    slots: int | None = None
    """Cells at a time; null: one a GPU (or a group of trainer.devices GPUs), without GPUs one a CPU core: two
    one-thread cells beat one two-thread cell at small size."""
    warm: bool = True
    """Fork cells from one process that has imported everything already."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"launcher.slots is {self.slots}; it must be at least 1")

    def check(self, devices: int) -> None:
        self._devices(devices)

    def threads(self, devices: int) -> int:
        return threads_of(self._devices(devices)[0])

    def launch(self, jobs: list[Job], devices: int, follow: Follow) -> list[Outcome]:
        slots, groups = self._devices(devices)
        return run_jobs(jobs, slots, groups, self.limits, self.fail_fast, self.warm, follow)

    def _devices(self, devices: int) -> tuple[int, list[str] | None]:
        """(cells at a time, the GPUs that each of them sees).

        Raises:
            ValueError: fewer GPUs than a cell wants, or more cells at a time than GPUs hold.
        """
        available = gpus()
        if not available:
            return self.slots or max(1, cores() // devices), None
        groups = [",".join(available[i : i + devices]) for i in range(0, len(available) - devices + 1, devices)]
        if not groups or (self.slots or 1) > len(groups):
            raise ValueError(
                f"{self.slots or 1} cell(s) at a time with trainer.devices={devices} want more GPUs than the "
                f"{len(available)} here; lower launcher.slots or trainer.devices"
            )
        return self.slots or len(groups), groups


def gpus() -> list[str]:
    """Ids of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES would name them."""
    import torch

    if not torch.cuda.is_available():
        return []
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named or [str(index) for index in range(torch.cuda.device_count())]
