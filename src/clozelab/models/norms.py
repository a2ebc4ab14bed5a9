"""Normalisation: LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019), by name."""

from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * w, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


NORMS = ("layernorm", "rmsnorm")


def norm(name: str, width: int, eps: float, bias: bool) -> nn.Module:
    """A norm of `width` features; RMSNorm has no bias by its definition."""
    return RMSNorm(width, eps) if name == "rmsnorm" else nn.LayerNorm(width, eps, bias=bias)


def is_norm(module: nn.Module) -> TypeGuard[nn.LayerNorm | RMSNorm]:
    """Whether the module's weight is a scale that begins at 1."""
    return isinstance(module, nn.LayerNorm | RMSNorm)
