"""Schemes of initial values for a matrix [out, in], by name."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def _truncated(value: Tensor, scale: float, generator: torch.Generator) -> None:
    """normal(scale), truncated at two standard deviations (google-research/bert)."""
    nn.init.trunc_normal_(value, std=scale, a=-2 * scale, b=2 * scale, generator=generator)


def _normal(value: Tensor, scale: float, generator: torch.Generator) -> None:
    """normal(scale) (fairseq's RoBERTa, GPT-2)."""
    nn.init.normal_(value, std=scale, generator=generator)


def _xavier(value: Tensor, scale: float, generator: torch.Generator) -> None:
    """uniform with the variance 2 / (fan_in + fan_out) (Glorot and Bengio 2010)."""
    nn.init.xavier_uniform_(value, generator=generator)


def _fan_in(value: Tensor, scale: float, generator: torch.Generator) -> None:
    """normal with the variance 1 / fan_in (LeCun et al. 1998)."""
    nn.init.normal_(value, std=value.shape[1] ** -0.5, generator=generator)


# For the matrices of layers and heads. Tables that are looked up (tokens, positions, segments) have no fan: they are
# "truncated" where the scheme goes by fans and knows no scale.
SCHEMES: dict[str, Callable[[Tensor, float, torch.Generator], None]] = {
    "truncated": _truncated,
    "normal": _normal,
    "xavier": _xavier,
    "fan_in": _fan_in,
}
KNOW_A_SCALE = ("truncated", "normal")
