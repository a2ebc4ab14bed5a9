"""Dropout from random bytes (Srivastava et al. 2014): keep where byte >= k, scale by 256 / (256 - k).

On a CPU a Bernoulli draw per element costs more than the layer that it regularises. Here one 64-bit word serves eight
elements. The words are SplitMix64 of a counter (the generator of `clozelab.seeds`), keyed by one draw from torch's
default generator: `torch.manual_seed` before a step fixes all its masks. Other devices have a fast kernel and use it.

The rate is rounded to k/256 (0.1 -> 26/256 = 0.1016) and the scale is exact for the rounded rate, so the mean is kept.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit word."""
    return word - (1 << 64) if word >= 1 << 63 else word


_MIX1, _MIX2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
_GOLDEN = _signed(0x9E3779B97F4A7C15)


def random_bytes(n: int) -> Tensor:
    """[n] uint8 on the CPU, uniform, drawn from torch's default generator."""
    key = torch.randint(-(1 << 63), (1 << 63) - 1, ())
    word = torch.arange((n + 7) // 8).add_(key).mul_(_GOLDEN)
    # torch shifts int64 arithmetically. The copies of the sign that come in from the left cost the first two steps
    # one bit of 64, which the products spread; in the last step they would fix the top bit, so there they are masked
    # away.
    word.bitwise_xor_(word >> 30).mul_(_MIX1)
    word.bitwise_xor_(word >> 27).mul_(_MIX2)
    return word.bitwise_xor_((word >> 31).bitwise_and_((1 << 33) - 1)).view(torch.uint8)[:n]


def rounded_rate(rate: float) -> tuple[int, float]:
    """(k, scale): of 256 byte values k drop, and what is kept is multiplied by scale."""
    k = min(round(rate * 256), 255)
    return k, 256 / (256 - k)


def keep_mask(shape: torch.Size | tuple[int, ...], rate: float, dtype: torch.dtype) -> Tensor:
    """0/1 mask in the dtype of the values: multiplying by it is one vectorised pass, selecting by a bool is not."""
    k, _ = rounded_rate(rate)
    return torch.ge(random_bytes(torch.Size(shape).numel()).view(shape), k, out=torch.empty(shape, dtype=dtype))


class _AddDropped(torch.autograd.Function):
    """residual + scale * keep * x in one pass; saves the mask alone."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor, rate: float) -> Tensor:
        keep = keep_mask(x.shape, rate, x.dtype)
        ctx.save_for_backward(keep)
        ctx.scale = rounded_rate(rate)[1]
        return torch.addcmul(residual, x, keep, value=ctx.scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (keep,) = ctx.saved_tensors
        return grads[0], (grads[0] * keep).mul_(ctx.scale), None


class _Dropped(torch.autograd.Function):
    """scale * keep * x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        keep = keep_mask(x.shape, rate, x.dtype).mul_(rounded_rate(rate)[1])
        ctx.save_for_backward(keep)
        return x * keep

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return grads[0] * keep, None


def _torchs_own(x: Tensor) -> bool:
    """Where torch's kernel is fast, or the compiler makes one."""
    return x.device.type != "cpu" or torch.compiler.is_compiling()


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """Dropout of x at the rate; x itself outside training."""
    if _torchs_own(x):
        return F.dropout(x, rate, training)
    if not training or rounded_rate(rate)[0] == 0:
        return x
    dropped: Tensor = _Dropped.apply(x, rate)  # type: ignore[no-untyped-call]
    return dropped


def add_dropped(residual: Tensor, x: Tensor, rate: float, training: bool) -> Tensor:
    """residual + dropout(x), in one pass on a CPU.

    Both have one dtype there: the stream between two products is in the dtype of the products.
    """
    if _torchs_own(x):
        return residual + F.dropout(x, rate, training)
    if not training or rounded_rate(rate)[0] == 0:
        return residual + x
    total: Tensor = _AddDropped.apply(residual, x, rate)  # type: ignore[no-untyped-call]
    return total
