"""The task: what is learnt beside the masked words."""

import dataclasses
import math

from clozelab.data.pairs import PairObjective, pair_objective
from clozelab.options import option


@option("task", "cloze")
@dataclasses.dataclass
class TaskOption:
    """Masked words, and a pair objective or none."""

    pair: str = "none"
    """Pair objective: none, next (NSP) or order (SOP)."""
    pair_weight: float = 1.0
    """Weight of the pair loss beside the masked-word loss."""

    def __post_init__(self) -> None:
        try:
            pair_objective(self.pair)
        except ValueError as error:
            raise ValueError(f"task.pair: {error}") from None
        if not (math.isfinite(self.pair_weight) and self.pair_weight >= 0):
            raise ValueError(f"task.pair_weight is {self.pair_weight}; give 0 or more")

    @property
    def objective(self) -> PairObjective:
        """The pair objective itself."""
        return pair_objective(self.pair)
