"""What a launcher is: where the cells of a sweep run.

Whatever the launcher, a cell is the same command in a process group of its own under the same supervision
(`running.supervise`), reads its own frozen configuration, and leaves its record in its directory, which all machines
share. A launcher only decides where `supervise` is called. A new one is one new file in `running/launchers/`.
"""

from dataclasses import dataclass

from clozelab.machine import cores
from clozelab.running.job import Job, Limits, Outcome
from clozelab.running.pool import Follow


@dataclass
class LauncherOption:
    """What every launcher can be told."""

    timeout: float | None = None
    """Minutes that an attempt of a cell may take; null: as long as it wants."""
    memory: float | None = None
    """GiB that the processes of a cell may take together (Linux); null: as much as there is."""
    retries: int = 0
    """Further attempts of a cell that failed; each goes on from the last checkpoint."""
    fail_fast: bool = False
    """After the first failure start nothing more and end what runs; else every other cell is run to its end."""

    def __post_init__(self) -> None:
        for key in ("timeout", "memory"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ValueError(f"launcher.{key} is {value}; give more than 0, or null for no limit")
        if self.retries < 0:
            raise ValueError(f"launcher.retries is {self.retries}; give 0 or more")

    @property
    def limits(self) -> Limits:
        """Time, memory and attempts of a cell."""
        seconds = None if self.timeout is None else 60 * self.timeout
        return Limits(seconds, None if self.memory is None else int(self.memory * 2**30), self.retries)

    def check(self, devices: int) -> None:
        """Refuse what cannot be launched, before anything is prepared.

        Args:
            devices: the most that a cell wants.

        Raises:
            ValueError: a package is missing, or the machine has too few devices.
        """

    def threads(self, devices: int) -> int:
        """CPU threads of a cell, where its configuration does not say."""
        return cores()

    def launch(self, jobs: list[Job], devices: int, follow: Follow) -> list[Outcome]:
        """Run every job to its end; the outcomes, in the order in which they ended.

        Raises:
            KeyboardInterrupt: after the running cells were ended.
        """
        raise NotImplementedError


def check_gpus(gpus: float, devices: int) -> None:
    """Refuse a request for fewer GPUs than a cell wants.

    Args:
        gpus: asked for a cell (`launcher.gpus`); 0: none, its ranks run on CPUs.
        devices: ranks of a cell.

    Raises:
        ValueError: names both settings.
    """
    if 0 < gpus < devices:
        raise ValueError(
            f"launcher.gpus is {gpus:g}, and a cell wants trainer.devices={devices} of them; raise the first, or lower "
            "the second"
        )
