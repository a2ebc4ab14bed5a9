"""Attention with linear biases (Press et al. 2022, section 3), in both directions: bias(i, j) = -m_n |i - j|.

The slopes m_n of N heads are the geometric sequence 2^(-8/N), 2^(-16/N), ..., 2^(-8) where N is a power of two; for
another N the sequence of the next smaller power is filled up with every other slope of the next larger one, as in the
authors' code.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clozelab.models.position import Position, Sizes, distance
from clozelab.options import option


def slopes(heads: int) -> list[float]:
    """m_n of every head."""
    power = 1 << (heads.bit_length() - 1)
    first = [2 ** (-8 * (n + 1) / power) for n in range(power)]
    between = [2 ** (-8 * (n + 1) / (2 * power)) for n in range(0, 2 * power, 2)]
    return first + between[: heads - power]


class Alibi(Position):
    """No parameters, any length."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.slopes = slopes(heads)

    def bias(self, query_BQ: Tensor, key_BS: Tensor) -> Tensor:
        """[B, N, Q, S]."""
        slope_N = torch.tensor(self.slopes, device=key_BS.device)
        return -slope_N[:, None, None] * distance(query_BQ, key_BS).abs()[:, None]


@option("model/position", "alibi")
@dataclass
class AlibiOption:
    """Linear biases by distance."""

    @property
    def longest(self) -> int | None:
        return None

    def build(self, sizes: Sizes) -> Alibi:
        return Alibi(sizes.heads)
