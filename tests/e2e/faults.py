"""A learning-rate schedule that does harm at a given share of the budget: how cells of the tests die.

It is chosen like any option, with CLOZELAB_OPTIONS=tests.e2e.faults: `schedule=faulty schedule.how=sigkill`. The
identity of a cell holds it, so a faulty cell is another cell than a sound one; with `once` it does its harm only while
a file is not there.
"""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from clozelab.options import option
from clozelab.training.optimizers import LinearOption

HOWS = ("none", "raises", "exits", "sigkill", "eats", "hangs", "nan")


@option("schedule", "faulty")
@dataclass
class Faulty(LinearOption):
    """The linear schedule, until `at`."""

    how: str = "none"
    """none, raises, exits (sys.exit(0)), sigkill, eats (memory), hangs, nan"""
    at: float = 0.5
    """share of the budget"""
    once: str = ""
    """a file: harm is done only while it is not there, and makes it"""

    def factor(self, progress: float) -> float:
        """As the linear schedule, or harm."""
        if progress >= self.at and self.how != "none" and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            return self._harm()
        return super().factor(progress)

    def _harm(self) -> float:
        if self.how == "raises":
            raise RuntimeError("a fault of the test's own")
        if self.how == "exits":
            sys.exit(0)
        if self.how == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "eats":
            held = []
            while True:  # until it is stopped
                held.append(bytearray(os.urandom(1 << 20) * 32))
                time.sleep(0.05)
        if self.how == "hangs":
            time.sleep(3600)
        return float("nan")
