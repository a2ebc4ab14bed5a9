"""Cross-entropy over a vocabulary, with the gradient of the logits made in place of the logits.

    loss_n = log sum_v exp(z_nv) - z_n,t(n),   z = h W^T + b,   dloss_n/dz_nv = exp(z_nv) / s_n - [v = t(n)]

The [N, V] logits dwarf every other activation of a small model, so what counts is the number of passes over them. Here the
matrix holds z, then e = exp(z) in place, then s_n times the gradient in place (the row sum s_n is divided out of the small
factors h and dh instead): three products, one exponential, one sum and one maximum. Left to autograd the matrix is copied
to float32, normalised and saved, and the same again backwards.

In place of the target stands minus the sum of the others, never a difference of two rounded numbers, so confident
predictions keep their small gradient in bf16 too.

Shapes: N targets, E embedding, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clozelab.models.dtype import compute_dtype

# Exponentials of bf16 logits are taken as they are while every row's maximum stays within these bounds.
_SMALLEST, _LARGEST = 2.0**-60, 2.0**60
_PARTS = 64


def _row_sums(e_NV: Tensor) -> Tensor:
    """[N] float32. A reduction of bf16 accumulates in float32 but rounds its result, so the sum is taken in parts."""
    if e_NV.dtype == torch.float32:
        return e_NV.sum(1)
    whole = e_NV.shape[1] // _PARTS * _PARTS
    return e_NV[:, :whole].unflatten(1, (_PARTS, -1)).sum(2).float().sum(1) + e_NV[:, whole:].float().sum(1)


def _row_maxima(e_NV: Tensor) -> Tensor:
    """[N] float32, of values that are not negative: their order is that of their bits, and integers compare faster."""
    if e_NV.dtype == torch.bfloat16:
        return e_NV.view(torch.int16).amax(1).view(torch.bfloat16).float()
    return e_NV.amax(1).float()


def _exponentials(h_NE: Tensor, weight_VE: Tensor, bias_V: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(e [N, V] = exp(z - shift) with 0 in place of the target, z - shift of the target [N], largest other e [N])."""
    index_N = _flat(target_N, len(bias_V))
    z_NV = torch.addmm(bias_V, h_NE, weight_VE.t())
    if z_NV.dtype == torch.bfloat16 and z_NV.device.type == "cpu":
        target_z_N = z_NV.view(-1)[index_N].float()
        e_NV = z_NV.exp_()
        e_NV.view(-1)[index_N] = 0.0
        largest_N = _row_maxima(e_NV)
        extreme_N = torch.maximum(largest_N, target_z_N.exp())
        if len(extreme_N) == 0 or (float(extreme_N.max()) < _LARGEST and float(extreme_N.min()) > _SMALLEST):
            return e_NV, target_z_N, largest_N
        z_NV = torch.addmm(bias_V, h_NE, weight_VE.t())
    z_NV -= z_NV.amax(1, keepdim=True)
    target_z_N = z_NV.view(-1)[index_N].float()
    e_NV = z_NV.exp_()
    e_NV.view(-1)[index_N] = 0.0
    return e_NV, target_z_N, _row_maxima(e_NV)


def _flat(target_N: Tensor, vocab_size: int) -> Tensor:
    """[N]: where the targets lie in the flattened [N, V]. (Scattering into rows copies the whole matrix on a CPU.)"""
    return target_N + torch.arange(len(target_N), device=target_N.device) * vocab_size


class _TargetLoss(torch.autograd.Function):
    """(loss [N], correct [N]) of h [N, E], the output embedding and its bias, and the targets [N]."""

    @staticmethod
    def forward(ctx: Any, h_NE: Tensor, weight_VE: Tensor, bias_V: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        e_NV, target_z_N, largest_N = _exponentials(h_NE, weight_VE, bias_V, target_N)
        others_N, target_e_N = _row_sums(e_NV), target_z_N.exp()
        sum_N = others_N + target_e_N
        e_NV.view(-1)[_flat(target_N, len(bias_V))] = -others_N.to(e_NV.dtype)
        ctx.save_for_backward(h_NE, weight_VE, e_NV, sum_N)
        correct_N = target_e_N.to(e_NV.dtype) > largest_N
        ctx.mark_non_differentiable(correct_N)
        return sum_N.log() - target_z_N, correct_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        h_NE, weight_VE, scaled_dz_NV, sum_N = ctx.saved_tensors
        scale_N1 = (grads[0] / sum_N)[:, None].to(h_NE.dtype)
        dh_NE = (scaled_dz_NV @ weight_VE).mul_(scale_N1)
        dweight_VE = scaled_dz_NV.t() @ (h_NE * scale_N1)
        dbias_V = (scale_N1.t() @ scaled_dz_NV)[0]
        return dh_NE, dweight_VE, dbias_V, None


def target_losses(h_NE: Tensor, weight_VE: Tensor, bias_V: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each target under logits h W^T + b.

    Returns:
        loss: [N] float32.
        correct: [N] bool, whether the target scores higher than every other word.
    """
    dtype = compute_dtype(h_NE)
    with torch.autocast(h_NE.device.type, enabled=False):
        scored: tuple[Tensor, Tensor] = _TargetLoss.apply(  # type: ignore[no-untyped-call]
            h_NE.to(dtype), weight_VE.to(dtype), bias_V.to(dtype), target_N
        )
    return scored


def pair_losses(logits_B2: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each pair: (loss [B] float32, correct [B] bool)."""
    logits_B2 = logits_B2.float()
    return F.cross_entropy(logits_B2, labels_B, reduction="none"), logits_B2.argmax(-1) == labels_B
