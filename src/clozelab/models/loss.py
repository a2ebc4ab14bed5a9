"""Cross-entropy over a vocabulary, with the gradient of the logits made in place of the logits.

    loss_n = log sum_v exp(z_vn) - z_t(n),n     z = W h^T + b     dloss_n/dz_vn = exp(z_vn) / s_n - [v = t(n)]

The V x N logits dwarf every other activation of a small model, so what counts on a CPU is the number of passes over
them that miss the cache. The vocabulary is taken in slices: the product, the exponential in place, and the product
e^T W that the gradient of h needs follow each other while a slice is warm. Two columns are joined to the factors, so
that the products also add the bias, return the sums s_n, and return the gradient of the bias:

    h' = [h | 1 | -shift]     W' = [W | b | 1]     z - shift = W' h'^T     e^T W' = [sum e W | sum e b | s]

No maximum is subtracted before the exponential: float32 and bf16 reach e^88, and in the rare batch that comes near, the
shift is set to the maximum and the slices are taken again. The target is kept out of every sum, and in its place in e
stands minus the sum of the others, never a difference of two rounded numbers: a confident prediction keeps its small
gradient.

Shapes: N targets, E embedding, A = E + columns joined, V vocabulary, C words in a slice.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clozelab.models.dtype import compute_dtype

# bf16 products come in blocks of 32 along E: the two columns cost one such block.
_JOINED = 32
# Sums of exponentials outside these bounds are taken again with a shift.
_SMALLEST, _LARGEST = 2.0**-60, 2.0**60
# Bytes of a slice of e. Smaller ones fit a nearer cache, but leave the products too small to be fast.
_SLICE = 1 << 22


def _joined(x: Tensor, first: Tensor | float, second: Tensor | float, dtype: torch.dtype) -> Tensor:
    """[rows, A]: x and two more columns, padded with zeros, in the dtype of the products."""
    rows, width = x.shape
    joined = torch.empty(rows, width + _JOINED, dtype=dtype)
    joined[:, :width] = x
    joined[:, width] = first
    joined[:, width + 1] = second
    joined[:, width + 2 :] = 0.0
    return joined


def _slices(words: int, targets: int, item: int) -> list[tuple[int, int]]:
    step = max(_SLICE // max(targets * item, 1), 256)
    return [(start, min(start + step, words)) for start in range(0, words, step)]


def _nonnegative_maxima(e_CN: Tensor) -> Tensor:
    """[N] of values that are not negative: the order of bf16 is then that of its bits, and integers compare faster."""
    if e_CN.dtype == torch.bfloat16:
        return e_CN.view(torch.int16).amax(0).view(torch.bfloat16)
    return e_CN.amax(0)


class _TargetLoss(torch.autograd.Function):
    """(loss [N], correct [N]) of h [N, E], the output embedding, its bias, and the targets [N]."""

    @staticmethod
    def forward(
        ctx: Any, h_NE: Tensor, weight_VE: Tensor, bias_V: Tensor, target_N: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        (targets, width), words = h_NE.shape, len(bias_V)
        h_NA = _joined(h_NE, 1.0, 0.0, dtype)
        weight_VA = _joined(weight_VE, bias_V, 1.0, dtype)
        e_VN = torch.empty(words, targets, dtype=dtype)
        of_target_NA = weight_VA[target_N].float()
        sums_NA, largest_N = _exponentials(h_NA, weight_VA, target_N, e_VN)
        target_z_N = (h_NA.float() * of_target_NA).sum(1)
        sum_N = sums_NA[:, width + 1] + target_z_N.exp()
        if targets and not _SMALLEST < float(sum_N.min()) <= float(sum_N.max()) < _LARGEST:
            shift_N = torch.stack([(weight_VA[a:b] @ h_NA.t()).amax(0) for a, b in _slices(words, targets, 4)]).amax(0)
            h_NA[:, width + 1] = -shift_N
            sums_NA, largest_N = _exponentials(h_NA, weight_VA, target_N, e_VN)
            target_z_N = (h_NA.float() * of_target_NA).sum(1)
            sum_N = sums_NA[:, width + 1] + target_z_N.exp()
        others_N = sums_NA[:, width + 1]
        e_VN.view(-1)[target_N * targets + torch.arange(targets)] = -others_N.to(dtype)
        # Its rows still have to be divided by s; so have those of h in the product that gives the gradient of W.
        scaled_dh_NE = sums_NA[:, :width] - others_N[:, None] * of_target_NA[:, :width]
        ctx.save_for_backward(h_NA, e_VN, sum_N, scaled_dh_NE)
        ctx.dtypes = h_NE.dtype, weight_VE.dtype, bias_V.dtype
        correct_N = target_z_N.exp() > largest_N
        ctx.mark_non_differentiable(correct_N)
        return sum_N.log() - target_z_N, correct_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        h_NA, e_VN, sum_N, scaled_dh_NE = ctx.saved_tensors
        scale_N1 = (grads[0] / sum_N)[:, None]
        width = scaled_dh_NE.shape[1]
        dweight_VA = e_VN @ (h_NA * scale_N1).to(h_NA.dtype)
        h_dtype, weight_dtype, bias_dtype = ctx.dtypes
        dweight_VE, dbias_V = dweight_VA[:, :width].to(weight_dtype), dweight_VA[:, width].to(bias_dtype)
        return (scaled_dh_NE * scale_N1).to(h_dtype), dweight_VE.contiguous(), dbias_V.contiguous(), None, None


def _exponentials(h_NA: Tensor, weight_VA: Tensor, target_N: Tensor, e_VN: Tensor) -> tuple[Tensor, Tensor]:
    """Fill e with exp(W' h'^T), 0 at the targets; returns (e^T W' [N, A] float32, largest e of each column [N])."""
    targets = len(target_N)
    sums_NA = torch.zeros(h_NA.shape)
    largest_N = torch.zeros(targets, dtype=e_VN.dtype)
    for start, end in _slices(len(e_VN), targets, e_VN.element_size()):
        e_CN = e_VN[start:end]
        torch.mm(weight_VA[start:end], h_NA.t(), out=e_CN)
        e_CN.exp_()
        (here,) = ((target_N >= start) & (target_N < end)).nonzero(as_tuple=True)
        e_CN.view(-1)[(target_N[here] - start) * targets + here] = 0.0
        largest_N = torch.maximum(largest_N, _nonnegative_maxima(e_CN))
        sums_NA += e_CN.t() @ weight_VA[start:end]
    return sums_NA, largest_N


def target_losses(h_NE: Tensor, weight_VE: Tensor, bias_V: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each target under logits h W^T + b.

    Returns:
        loss: [N] float32.
        correct: [N] bool, whether the target scores higher than every other word.
    """
    if h_NE.device.type != "cpu" or torch.compiler.is_compiling():
        logits_NV = F.linear(h_NE, weight_VE, bias_V)
        return F.cross_entropy(logits_NV.float(), target_N, reduction="none"), logits_NV.argmax(1) == target_N
    dtype = compute_dtype(h_NE)
    with torch.autocast("cpu", enabled=False):
        scored: tuple[Tensor, Tensor] = _TargetLoss.apply(  # type: ignore[no-untyped-call]
            h_NE, weight_VE, bias_V, target_N, dtype
        )
    return scored


def pair_losses(logits_B2: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each pair: (loss [B] float32, correct [B] bool)."""
    logits_B2 = logits_B2.float()
    return F.cross_entropy(logits_B2, labels_B, reduction="none"), logits_B2.argmax(-1) == labels_B


def replaced_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Binary cross-entropy of each token, any shape: (loss float32, correct bool)."""
    logits = logits.float()
    loss = F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none")
    return loss, (logits > 0) == labels
