"""What a position scheme is: how a token knows where it stands.

A scheme may act in four places, and each is a hook that does nothing unless the scheme overrides it:

    embed    x = token + embed(i) + segment           learned, sinusoidal
    angles   q_i, k_j turned by angles that grow with i and j     RoPE
    bias     q_i . k_j / sqrt(D) + bias(i, j)         ALiBi, T5
    scores   q_i . k_j / sqrt(D) + scores(q_i, j)     relative keys

An option of the group `model/position` makes the module. A new scheme is one new file in `models/positions/`.

Shapes: B sequences (1 where all have the same positions), S positions, Q positions that ask, E embedding, N heads,
D = head width.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """What a scheme may need to know of its encoder."""

    embedding: int
    """E."""
    heads: int
    """N."""
    head_width: int
    """D."""
    attentions: int
    """Attention layers with parameters of their own (shared ones counted once)."""


class Position(nn.Module):
    """A scheme that acts nowhere: attention sees a bag of words."""

    def embed(self, position: Tensor) -> Tensor | None:
        """[..., E] to be added to the token embedding at each of the positions [...]."""
        return None

    def angles(self, position: Tensor, local: bool) -> Tensor | None:
        """[..., D / 2] float32: the angle by which each pair of the head's dimensions is turned at the positions [...].

        Args:
            position: counted from 0.
            local: whether it is for a layer with local attention.
        """
        return None

    def bias(self, query_BQ: Tensor, key_BS: Tensor) -> Tensor | None:
        """[B, N, Q, S] added to the scaled scores of every layer."""
        return None

    def scores(self, q_BNQD: Tensor, k_BNSD: Tensor, query_BQ: Tensor, key_BS: Tensor, attention: int) -> Tensor | None:
        """[B, N, Q, S] added to the scaled scores of attention layer number `attention`, where these depend on what q
        and k hold."""
        return None


class PositionOption(Protocol):
    """What an option of the group `model/position` can do."""

    @property
    def longest(self) -> int | None:
        """The longest sequence that the scheme can hold; None: any."""

    def build(self, sizes: Sizes) -> Position:
        """The scheme's module.

        Raises:
            ValueError: the encoder's sizes do not allow the scheme.
        """


def at_least_one(key: str, value: int) -> None:
    """Refuse a size of 0 or less.

    Raises:
        ValueError: names the key.
    """
    if value < 1:
        raise ValueError(f"model.position.{key} must be at least 1, not {value}")


def distance(query_BQ: Tensor, key_BS: Tensor) -> Tensor:
    """[B, Q, S] int64: how far behind the asking position each key stands (negative: before it)."""
    return key_BS[:, None, :] - query_BQ[:, :, None]
