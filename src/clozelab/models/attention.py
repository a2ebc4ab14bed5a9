"""Multi-head self-attention (Vaswani et al. 2017, section 3.2.2): softmax(Q K^T / sqrt(D)) V, heads side by side.

Shapes: B sequences, S positions, Q positions asked for (Q = S but in a last block), H hidden, N heads, D = H / N,
P = B x N.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clozelab.models.dropout import keep_mask, rounded_rate
from clozelab.models.linear import Linear, linear


def _split_heads(x_BSX: Tensor, heads: int, parts: int) -> Tensor:
    """[parts, B, N, S, D] view of [B, S, parts x H]."""
    batch, length, width = x_BSX.shape
    return x_BSX.view(batch, length, parts, heads, width // (parts * heads)).permute(2, 0, 3, 1, 4)


def _join_heads(x_PSD: Tensor, heads: int, parts: int = 1) -> Tensor:
    """[B, S, parts x H] of [parts x P, S, D]: the inverse."""
    pairs, length, width = x_PSD.shape
    return x_PSD.view(parts, pairs // (parts * heads), heads, length, width).permute(1, 3, 0, 2, 4).flatten(2)


class _TwoProducts(torch.autograd.Function):
    """Attention as two batched products around a softmax, forward and backward.

    On a CPU, for sequences up to some hundreds, this is several times faster in bf16 than the flash kernel, whose inner
    products are too small for the matrix units; and that kernel has no dropout. What is left is memory traffic, hence
    one copy to split the heads and one to join them, both scales inside the products, and buffers used in place.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv_BSX: Tensor, q_BQH: Tensor | None, bias_B1S: Tensor | None, heads: int, rate: float
    ) -> Tensor:
        if q_BQH is None:
            q_PQD, k_PSD, v_PSD = _split_heads(qkv_BSX, heads, 3).contiguous().flatten(1, 2)
        else:
            (q_PQD,) = _split_heads(q_BQH, heads, 1).contiguous().flatten(1, 2)
            k_PSD, v_PSD = _split_heads(qkv_BSX, heads, 2).contiguous().flatten(1, 2)
        pairs, queries, width = q_PQD.shape
        ctx.scale, (k, ctx.keep_scale) = 1 / math.sqrt(width), rounded_rate(rate)
        weight_PQS = q_PQD.new_empty(pairs, queries, k_PSD.shape[1])
        torch.baddbmm(weight_PQS, q_PQD, k_PSD.mT, beta=0, alpha=ctx.scale, out=weight_PQS)
        if bias_B1S is not None:
            weight_PQS.view(len(bias_B1S), heads, *weight_PQS.shape[1:]).add_(bias_B1S[:, None])
        torch.softmax(weight_PQS, -1, out=weight_PQS)
        keep_PQS, dropped_PQS = None, weight_PQS
        if k:
            keep_PQS = keep_mask(weight_PQS.shape, rate, weight_PQS.dtype)
            dropped_PQS = weight_PQS * keep_PQS
        y_PQD = torch.empty_like(q_PQD)
        torch.baddbmm(y_PQD, dropped_PQS, v_PSD, beta=0, alpha=ctx.keep_scale, out=y_PQD)
        ctx.save_for_backward(q_PQD, k_PSD, v_PSD, weight_PQS, dropped_PQS, keep_PQS)
        ctx.heads, ctx.packed = heads, q_BQH is None
        return _join_heads(y_PQD, heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        q_PQD, k_PSD, v_PSD, weight_PQS, dropped_PQS, keep_PQS = ctx.saved_tensors
        dy_PQD = _split_heads(grads[0], ctx.heads, 1).contiguous().flatten(0, 2)
        pairs, length, width = k_PSD.shape
        parts = 3 if ctx.packed else 2
        d_XPSD = k_PSD.new_empty(parts, pairs, length, width)
        dq_PQD = d_XPSD[0] if ctx.packed else torch.empty_like(q_PQD)
        dk_PSD, dv_PSD = d_XPSD[-2], d_XPSD[-1]
        torch.baddbmm(dv_PSD, dropped_PQS.mT, dy_PQD, beta=0, alpha=ctx.keep_scale, out=dv_PSD)
        dweight_PQS = torch.empty_like(weight_PQS)
        torch.baddbmm(dweight_PQS, dy_PQD, v_PSD.mT, beta=0, alpha=ctx.keep_scale, out=dweight_PQS)
        if keep_PQS is not None:
            dweight_PQS *= keep_PQS
        dscore_PQS = torch._softmax_backward_data(dweight_PQS, weight_PQS, -1, weight_PQS.dtype)
        torch.baddbmm(dq_PQD, dscore_PQS, k_PSD, beta=0, alpha=ctx.scale, out=dq_PQD)
        torch.baddbmm(dk_PSD, dscore_PQS.mT, q_PQD, beta=0, alpha=ctx.scale, out=dk_PSD)
        dq_BQH = None if ctx.packed else _join_heads(dq_PQD, ctx.heads)
        return _join_heads(d_XPSD.flatten(0, 1), ctx.heads, parts), dq_BQH, None, None, None


def attend(qkv_BSX: Tensor, q_BQH: Tensor | None, mask_BS: Tensor | None, heads: int, rate: float) -> Tensor:
    """[B, Q, H]: what each query reads from the positions that the mask allows.

    Args:
        qkv_BSX: [B, S, 3 H] queries, keys and values; or [B, S, 2 H] keys and values where the queries are given apart.
        q_BQH: the queries, if not in qkv.
        mask_BS: [B, S] bool, False where nothing may be read.
        heads: N.
        rate: dropout of the attention weights.
    """
    # The flash kernels are right on a GPU, and in fp32 without dropout on a CPU.
    if qkv_BSX.device.type == "cpu" and (qkv_BSX.dtype == torch.bfloat16 or rate > 0):
        bias_B1S = None
        if mask_BS is not None:
            bias_B1S = torch.zeros_like(mask_BS, dtype=qkv_BSX.dtype).masked_fill_(~mask_BS, -math.inf)[:, None]
        y_BQH: Tensor = _TwoProducts.apply(qkv_BSX, q_BQH, bias_B1S, heads, rate)  # type: ignore[no-untyped-call]
        return y_BQH
    if q_BQH is None:
        q_BNQD, k_BNSD, v_BNSD = _split_heads(qkv_BSX, heads, 3)
    else:
        (q_BNQD,) = _split_heads(q_BQH, heads, 1)
        k_BNSD, v_BNSD = _split_heads(qkv_BSX, heads, 2)
    mask_B11S = None if mask_BS is None else mask_BS[:, None, None]
    y_BNQD = F.scaled_dot_product_attention(q_BNQD, k_BNSD, v_BNSD, attn_mask=mask_B11S, dropout_p=rate)
    return y_BNQD.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Queries, keys and values from one product, attention, and the output projection."""

    def __init__(self, hidden: int, heads: int, rate: float) -> None:
        super().__init__()
        self.heads = heads
        self.rate = rate
        self.qkv = Linear(hidden, 3 * hidden)
        self.output = Linear(hidden, hidden)

    def forward(self, x_BSH: Tensor, mask_BS: Tensor | None, x_BQH: Tensor | None = None) -> Tensor:
        """[B, Q, H]: attention from the queries x_BQH (all positions if None) to x_BSH."""
        if x_BQH is None:
            qkv_BSX, q_BQH = self.qkv(x_BSH), None
        else:
            hidden = x_BSH.shape[-1]
            q_BQH = linear(x_BQH, self.qkv.weight[:hidden], self.qkv.bias[:hidden])
            qkv_BSX = linear(x_BSH, self.qkv.weight[hidden:], self.qkv.bias[hidden:])
        y_BQH: Tensor = self.output(attend(qkv_BSX, q_BQH, mask_BS, self.heads, self.rate if self.training else 0.0))
        return y_BQH
