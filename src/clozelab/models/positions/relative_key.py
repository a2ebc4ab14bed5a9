"""Relative keys: a learned vector for every distance, multiplied by the query (Shaw et al. 2018, section 3.2, without
values), and in the second variant by the key too (Huang et al. 2020, method 4): the two relative variants of BERT.

    score = (q_i . k_j + q_i . a_(i-j) [+ k_j . a_(i-j)]) / sqrt(D)
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clozelab.models.position import Position, Sizes, at_least_one, distance
from clozelab.options import option


class RelativeKey(Position):
    """One table of 2 `length` - 1 rows for every attention layer, shared by its heads."""

    def __init__(self, length: int, keys: bool, sizes: Sizes) -> None:
        super().__init__()
        self.length, self.keys = length, keys
        tables = (torch.empty(2 * length - 1, sizes.head_width) for _ in range(sizes.attentions))
        self.tables = nn.ParameterList([nn.Parameter(table) for table in tables])

    def scores(self, q_BNQD: Tensor, k_BNSD: Tensor, query_BQ: Tensor, key_BS: Tensor, attention: int) -> Tensor:
        """[B, N, Q, S]."""
        row_BQS = self.length - 1 - distance(query_BQ, key_BS)
        relative_BQSD = F.embedding(row_BQS, self.tables[attention]).to(q_BNQD.dtype)
        score_BNQS = torch.einsum("bnqd,bqsd->bnqs", q_BNQD, relative_BQSD.expand(len(q_BNQD), -1, -1, -1))
        if self.keys:
            k_BNSD = k_BNSD.repeat_interleave(q_BNQD.shape[1] // k_BNSD.shape[1], 1)
            expanded_BQSD = relative_BQSD.expand(len(q_BNQD), -1, -1, -1)
            score_BNQS = score_BNQS + torch.einsum("bnsd,bqsd->bnqs", k_BNSD, expanded_BQSD)
        return score_BNQS / math.sqrt(q_BNQD.shape[-1])


@option("model/position", "relative_key")
@dataclass
class RelativeKeyOption:
    """Relative position embeddings of BERT's variants."""

    length: int = 512
    """Longest sequence: distances up to `length` - 1 have a row."""
    keys: bool = False
    """Multiply by the key too ("relative_key_query")."""

    def __post_init__(self) -> None:
        at_least_one("length", self.length)

    @property
    def longest(self) -> int | None:
        return self.length

    def build(self, sizes: Sizes) -> RelativeKey:
        return RelativeKey(self.length, self.keys, sizes)
