"""A learned bias for each bucket of distances and head, one table for all layers (T5, Raffel et al. 2020, section 2.1).

Half of the buckets look back, half ahead. Of each half, the first half hold one distance each; the others grow
logarithmically up to `furthest`, and the last holds all that is further.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clozelab.models.position import Position, Sizes, distance
from clozelab.options import option


def bucket(distance_BQS: Tensor, buckets: int, furthest: int) -> Tensor:
    """[B, Q, S]: the bucket, 0 to `buckets` - 1, of each distance."""
    half = buckets // 2
    exact = half // 2
    far_BQS = distance_BQS.abs()
    growth_BQS = torch.log(far_BQS.float().clamp(min=1) / exact) / math.log(furthest / exact)
    log_BQS = (exact + (growth_BQS * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(far_BQS < exact, far_BQS, log_BQS) + half * (distance_BQS > 0)


class T5Bias(Position):
    """bias(i, j) = table[bucket(j - i), head]."""

    def __init__(self, buckets: int, furthest: int, heads: int) -> None:
        super().__init__()
        self.buckets, self.furthest = buckets, furthest
        self.weight = nn.Parameter(torch.empty(buckets, heads))

    def bias(self, query_BQ: Tensor, key_BS: Tensor) -> Tensor:
        """[B, N, Q, S]."""
        bucket_BQS = bucket(distance(query_BQ, key_BS), self.buckets, self.furthest)
        return F.embedding(bucket_BQS, self.weight).permute(0, 3, 1, 2)


@option("model/position", "t5_bias")
@dataclass
class T5BiasOption:
    """T5's relative position bias."""

    buckets: int = 32
    """Rows of the table; a multiple of 4."""
    furthest: int = 128
    """Distance from which on all share the last bucket."""

    def __post_init__(self) -> None:
        if self.buckets < 4 or self.buckets % 4:
            raise ValueError(f"model.position.buckets must be a multiple of 4, not {self.buckets}")
        if self.furthest <= self.buckets // 4:
            raise ValueError(
                f"model.position.furthest={self.furthest} must be greater than model.position.buckets / 4 = "
                f"{self.buckets // 4}: smaller distances have a bucket each"
            )

    @property
    def longest(self) -> int | None:
        return None

    def build(self, sizes: Sizes) -> T5Bias:
        return T5Bias(self.buckets, self.furthest, sizes.heads)
