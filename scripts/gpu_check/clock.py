"""The time that is left, and how it is shared out."""

import time

# Kept back for packing the records and writing the report.
RESERVE = 10.0


class Clock:
    """Counts down from `total` seconds since it was made."""

    def __init__(self, total: float) -> None:
        self.total = total
        self._start = time.monotonic()

    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def left(self) -> float:
        """Seconds that work may still take."""
        return self.total - RESERVE - self.spent()

    def share(self, part: float) -> float:
        """Seconds for a phase that may take `part` of the whole: less where less is left."""
        return max(0.0, min(part * self.total, self.left()))


class Countdown:
    """Seconds left of `seconds` since it was made."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def __call__(self) -> float:
        return max(0.0, self._end - time.monotonic())
