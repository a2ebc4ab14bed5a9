"""A vector for every position, learned (Gehring et al. 2017; BERT, Devlin et al. 2019)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clozelab.models.position import Position, Sizes, at_least_one
from clozelab.options import option


class Learned(Position):
    """A table of `length` rows after `offset` unused ones."""

    def __init__(self, length: int, offset: int, embedding: int) -> None:
        super().__init__()
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(length + offset, embedding))

    def embed(self, position: Tensor) -> Tensor:
        """[..., E]."""
        return F.embedding(position + self.offset, self.weight)


@option("model/position", "learned")
@dataclass
class LearnedOption:
    """BERT's position embedding."""

    length: int = 512
    """Longest sequence: rows of the table."""
    offset: int = 0
    """Unused rows before position 0: RoBERTa counts positions from padding_idx + 1 = 2."""

    def __post_init__(self) -> None:
        at_least_one("length", self.length)
        if self.offset < 0:
            raise ValueError(f"model.position.offset must be at least 0, not {self.offset}")

    @property
    def longest(self) -> int | None:
        return self.length

    def build(self, sizes: Sizes) -> Learned:
        return Learned(self.length, self.offset, sizes.embedding)
