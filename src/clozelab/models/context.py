"""What attention needs beside queries, keys and values: who sees whom, and how where they stand enters the scores.

Made once for all layers of a kind. There are at most four kinds in a forward pass: global and local layers, for all
positions and for the positions that are asked for.

Shapes: B sequences (1 where all have the same), N heads (1 likewise), Q positions that ask, S positions, D head width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from clozelab.models.layout import Layout
from clozelab.models.position import Position, distance

# Added to the score of what may not be seen. Finite: a row that sees nothing (all padding) gets some numbers, not NaN.
HIDDEN = -1e30


class AttentionContext(NamedTuple):
    """See above."""

    layout: Layout
    position: Position
    query_BQ: Tensor
    """[B, Q] position of each query."""
    key_BS: Tensor
    """[B, S] position of each key."""
    bias_BNQS: Tensor | None
    """[B, N, Q, S] added to the scaled scores, in the dtype of the products; None: nothing."""
    query_angles: Tensor | None
    """[B, 1, Q, D / 2] by which queries are turned, float32; None: not at all."""
    key_angles: Tensor | None
    """[B, 1, S, D / 2] the same for keys."""


def attention_context(
    layout: Layout,
    position: Position,
    window: int | None,
    dtype: torch.dtype,
    place_BQ: Tensor | None = None,
    causal: bool = False,
) -> AttentionContext:
    """The context of one kind of layer.

    Args:
        layout: where the tokens stand.
        position: the position scheme.
        window: of local attention: positions at most window // 2 apart see each other; None: all do.
        dtype: of the products.
        place_BQ: [B, Q] places of the queries in their rows; None: all places, in order.
        causal: a position sees itself and those before it alone.
    """
    key_BS = layout.position_BS
    query_BQ = key_BS if place_BQ is None else key_BS.expand(layout.batch, -1).gather(1, place_BQ)
    seen_BQS: Tensor | None = None
    if layout.mask_BS is not None:
        seen_BQS = layout.mask_BS[:, None, :]
    if layout.document_BS is not None:
        asking_BQ = layout.document_BS if place_BQ is None else layout.document_BS.gather(1, place_BQ)
        same_BQS = asking_BQ[:, :, None] == layout.document_BS[:, None, :]
        seen_BQS = same_BQS if seen_BQS is None else seen_BQS & same_BQS
    if window is not None:
        near_BQS = distance(query_BQ, key_BS).abs() <= window // 2
        seen_BQS = near_BQS if seen_BQS is None else seen_BQS & near_BQS
    if causal:
        before_BQS = distance(query_BQ, key_BS) <= 0
        seen_BQS = before_BQS if seen_BQS is None else seen_BQS & before_BQS
    bias_BNQS = position.bias(query_BQ, key_BS)
    if bias_BNQS is not None:
        bias_BNQS = bias_BNQS.to(dtype)
    if seen_BQS is not None:
        hidden_B1QS = torch.zeros_like(seen_BQS, dtype=dtype).masked_fill_(~seen_BQS, HIDDEN)[:, None]
        bias_BNQS = hidden_B1QS if bias_BNQS is None else bias_BNQS + hidden_B1QS
    query_angles = position.angles(query_BQ, window is not None)
    key_angles = position.angles(key_BS, window is not None)
    return AttentionContext(
        layout,
        position,
        query_BQ,
        key_BS,
        bias_BNQS,
        None if query_angles is None else query_angles[:, None],
        None if key_angles is None else key_angles[:, None],
    )
