"""A length schedule: most of a budget on short sequences, the rest on long ones (BERT: 90 % at 128, then 512).

Each phase is a run of batches of its own format length. Where it ends is fixed before the run, in steps: so many as
spend its share of the budget with sequences of average length. A batch stays a pure function of the step.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from clozelab.data.batches import Batch, Batches
from clozelab.data.format import FormatOption

Schedule = list[tuple[float, int]]


def schedule_of(lengths: Sequence[Sequence[float]] | None, max_length: int) -> Schedule:
    """[(share of the budget until which it lasts, positions)] of the setting `lengths`; null is one phase.

    Raises:
        ValueError: not a list of pairs, or shares that do not rise to 1.
    """
    if lengths is None:
        return [(1.0, max_length)]
    try:
        found = [(float(share), int(length)) for share, length in lengths]
        whole = all(length == float(given) for (_, length), (_, given) in zip(found, lengths, strict=True))
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"lengths is {lengths}; give pairs of share and length: lengths=[[0.9,128],[1,512]]") from None
    if not whole:
        raise ValueError(f"lengths is {lengths}; give lengths in whole positions: lengths=[[0.9,128],[1,512]]")
    shares = [share for share, _ in found]
    if not found or not shares[0] > 0 or shares[-1] != 1 or not all(a < b for a, b in itertools.pairwise(shares)):
        raise ValueError(f"lengths is {lengths}; the shares must rise, and end at 1: lengths=[[0.9,128],[1,512]]")
    return found


def formats_of(config: dict[str, Any], format_: FormatOption) -> list[tuple[float, FormatOption]]:
    """The format of each phase of a run's configuration."""
    schedule = schedule_of(config.get("lengths"), format_.max_length)
    return [(share, dataclasses.replace(format_, max_length=length)) for share, length in schedule]


@dataclasses.dataclass(frozen=True)
class Phases:
    """Batches of one phase after the other.

    Attributes:
        first_steps: the step at which each phase begins; the first is 0.
        phases: their batches.
    """

    first_steps: list[int]
    phases: list[Batches]

    @property
    def batch_size(self) -> int:
        """Sequences a step, as far as ranks must be able to part them."""
        return self.phases[0].batch_size

    def number(self, step: int) -> int:
        """Which phase a step is in."""
        return bisect.bisect_right(self.first_steps, step) - 1

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """Batch `step` (from 0); under `world` ranks, the rows rank, rank + world, ... of it."""
        number = self.number(step)
        return self.phases[number].batch(step - self.first_steps[number], rank, world)
