"""No positions: the encoder sees a bag of words. The control arm of every claim about position schemes."""

from dataclasses import dataclass

from clozelab.models.position import Position, Sizes
from clozelab.options import option


@option("model/position", "none")
@dataclass
class NoneOption:
    """No position information at all."""

    @property
    def longest(self) -> int | None:
        return None

    def build(self, sizes: Sizes) -> Position:
        return Position()
