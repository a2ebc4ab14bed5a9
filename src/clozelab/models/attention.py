"""Multi-head self-attention (Vaswani et al. 2017, section 3.2.2): softmax(Q K^T / sqrt(D) + bias) V, head by head.

Keys and values may have fewer heads than queries: each serves a group of them (grouped-query attention, Ainslie et al.
2023; one for all is multi-query attention, Shazeer 2019).

Shapes: B sequences, S positions, Q positions asked for (Q = S but in a last block), H hidden, N heads, G key/value
heads, D = H / N, C = (N + 2 G) D. In the kernel P = B G, and R = (N / G) Q the rows of scores that share keys.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clozelab.models.context import AttentionContext
from clozelab.models.dropout import keep_mask, rounded_rate
from clozelab.models.linear import Linear, linear


class _SplitHeads(torch.autograd.Function):
    """Contiguous [B, heads, S, D] of each part of [B, S, C]; backward writes the parts into one [B, S, C].

    torch's own views would leave the copies to the products, and need one more in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x_BSC: Tensor, width: int, *heads: int) -> tuple[Tensor, ...]:
        ctx.heads, ctx.width = heads, width
        return tuple(part.contiguous() for part in _head_views(x_BSC, width, heads))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        batch, _, length, width = grads[0].shape
        dx_BSC = grads[0].new_empty(batch, length, sum(ctx.heads) * width)
        for view, grad in zip(_head_views(dx_BSC, width, ctx.heads), grads, strict=True):
            view.copy_(grad)
        return dx_BSC, None, *(None for _ in ctx.heads)


def _head_views(x_BSC: Tensor, width: int, heads: tuple[int, ...]) -> list[Tensor]:
    parts = torch.split(x_BSC, [width * n for n in heads], -1)
    return [part.view(*part.shape[:2], n, width).transpose(1, 2) for part, n in zip(parts, heads, strict=True)]


def split_heads(x_BSC: Tensor, width: int, *heads: int) -> tuple[Tensor, ...]:
    """[B, n, S, D] for each n of `heads`, of the parts that lie side by side in x."""
    if x_BSC.device.type == "cpu" and not torch.compiler.is_compiling():
        parts: tuple[Tensor, ...] = _SplitHeads.apply(x_BSC, width, *heads)  # type: ignore[no-untyped-call]
        return parts
    return tuple(_head_views(x_BSC, width, heads))


def rotate(x_BNSD: Tensor, angles: Tensor) -> Tensor:
    """x with the pair of dimensions (k, k + D/2) turned by angle k; angles broadcast to [B, N, S, D / 2]."""
    cos, sin = angles.cos(), angles.sin()
    first, second = x_BNSD.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x_BNSD.dtype)


class _TwoProducts(torch.autograd.Function):
    """Attention as two batched products around a softmax, forward and backward.

    On a CPU, for sequences up to some hundreds, this is several times faster in bf16 than the flash kernel, whose inner
    products are too small for the matrix units; and that kernel has no dropout. What is left is memory traffic, hence
    both scales inside the products, and buffers used in place. The queries of a group stand below each other, so that
    their keys are not repeated.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BNQD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, bias_BNQS: Tensor | None, rate: float
    ) -> Tensor:
        batch, heads, queries, width = q_BNQD.shape
        k_PSD, v_PSD = k_BGSD.flatten(0, 1), v_BGSD.flatten(0, 1)
        pairs, length, _ = k_PSD.shape
        q_PRD = q_BNQD.reshape(pairs, -1, width)
        ctx.scale, (k, ctx.keep_scale) = 1 / math.sqrt(width), rounded_rate(rate)
        weight_PRS = q_PRD.new_empty(pairs, q_PRD.shape[1], length)
        torch.baddbmm(weight_PRS, q_PRD, k_PSD.mT, beta=0, alpha=ctx.scale, out=weight_PRS)
        if bias_BNQS is not None:
            weight_PRS.view(batch, heads, queries, length).add_(bias_BNQS)
        torch.softmax(weight_PRS, -1, out=weight_PRS)
        keep_PRS, dropped_PRS = None, weight_PRS
        if k:
            keep_PRS = keep_mask(weight_PRS.shape, rate, weight_PRS.dtype)
            dropped_PRS = weight_PRS * keep_PRS
        y_PRD = torch.empty_like(q_PRD)
        torch.baddbmm(y_PRD, dropped_PRS, v_PSD, beta=0, alpha=ctx.keep_scale, out=y_PRD)
        ctx.save_for_backward(q_PRD, k_PSD, v_PSD, weight_PRS, dropped_PRS, keep_PRS)
        ctx.shapes = q_BNQD.shape, k_BGSD.shape, None if bias_BNQS is None else bias_BNQS.shape
        return y_PRD.view(q_BNQD.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        q_PRD, k_PSD, v_PSD, weight_PRS, dropped_PRS, keep_PRS = ctx.saved_tensors
        q_shape, k_shape, bias_shape = ctx.shapes
        dy_PRD = grads[0].reshape(q_PRD.shape)
        dq_PRD, dk_PSD, dv_PSD = torch.empty_like(q_PRD), torch.empty_like(k_PSD), torch.empty_like(v_PSD)
        torch.baddbmm(dv_PSD, dropped_PRS.mT, dy_PRD, beta=0, alpha=ctx.keep_scale, out=dv_PSD)
        dweight_PRS = torch.empty_like(weight_PRS)
        torch.baddbmm(dweight_PRS, dy_PRD, v_PSD.mT, beta=0, alpha=ctx.keep_scale, out=dweight_PRS)
        if keep_PRS is not None:
            dweight_PRS *= keep_PRS
        dscore_PRS = torch._softmax_backward_data(dweight_PRS, weight_PRS, -1, weight_PRS.dtype)
        torch.baddbmm(dq_PRD, dscore_PRS, k_PSD, beta=0, alpha=ctx.scale, out=dq_PRD)
        torch.baddbmm(dk_PSD, dscore_PRS.mT, q_PRD, beta=0, alpha=ctx.scale, out=dk_PSD)
        dbias = None
        if bias_shape is not None and ctx.needs_input_grad[3]:
            dbias = dscore_PRS.view(*q_shape[:3], k_shape[2]).sum_to_size(bias_shape)
        return dq_PRD.view(q_shape), dk_PSD.view(k_shape), dv_PSD.view(k_shape), dbias, None


def attend(q_BNQD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, bias_BNQS: Tensor | None, rate: float) -> Tensor:
    """[B, N, Q, D]: what each query reads.

    Args:
        q_BNQD: queries.
        k_BGSD: keys; G divides N.
        v_BGSD: values.
        bias_BNQS: added to the scaled scores; may broadcast, and may want a gradient.
        rate: dropout of the attention weights.
    """
    # The flash kernels are right on a GPU, and in fp32 without dropout on a CPU.
    on_cpu = q_BNQD.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_cpu and (q_BNQD.dtype == torch.bfloat16 or rate > 0):
        y_BNQD: Tensor = _TwoProducts.apply(  # type: ignore[no-untyped-call]
            q_BNQD, k_BGSD, v_BGSD, bias_BNQS, rate
        )
        return y_BNQD
    grouped = q_BNQD.shape[1] != k_BGSD.shape[1]
    return F.scaled_dot_product_attention(
        q_BNQD, k_BGSD, v_BGSD, attn_mask=bias_BNQS, dropout_p=rate, enable_gqa=grouped
    )


class SelfAttention(nn.Module):
    """Queries, keys and values from one product, attention, and the output projection.

    Args:
        hidden: H.
        heads: N.
        kv_heads: G.
        bias: the two projections have one.
        rate: dropout of the attention weights.
        number: which of the encoder's attention layers it is.
    """

    def __init__(self, hidden: int, heads: int, kv_heads: int, bias: bool, rate: float, number: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.rate, self.number = heads, kv_heads, rate, number
        self.width = hidden // heads
        self.qkv = Linear(hidden, hidden + 2 * kv_heads * self.width, bias=bias)
        self.output = Linear(hidden, hidden, bias=bias)

    def forward(self, x: Tensor, context: AttentionContext, x_BQH: Tensor | None = None) -> Tensor:
        """What the queries x_BQH (all of x if None) read from all positions x, which is [B, S, H] or unpadded."""
        layout, groups = context.layout, (self.kv_heads, self.kv_heads)
        if x_BQH is None:
            q, k, v = split_heads(layout.spread(self.qkv(x)), self.width, self.heads, *groups)
        else:
            hidden, weight, bias = x.shape[-1], self.qkv.weight, self.qkv.bias
            of_queries, of_keys = (None, None) if bias is None else (bias[:hidden], bias[hidden:])
            (q,) = split_heads(linear(x_BQH, weight[:hidden], of_queries), self.width, self.heads)
            k, v = split_heads(layout.spread(linear(x, weight[hidden:], of_keys)), self.width, *groups)
        if context.query_angles is not None and context.key_angles is not None:
            q, k = rotate(q, context.query_angles), rotate(k, context.key_angles)
        bias_BNQS = context.bias_BNQS
        scores_BNQS = context.position.scores(q, k, context.query_BQ, context.key_BS, self.number)
        if scores_BNQS is not None:
            bias_BNQS = scores_BNQS if bias_BNQS is None else scores_BNQS + bias_BNQS
        y_BNQD = attend(q, k, v, bias_BNQS, self.rate if self.training else 0.0)
        y_BQH = y_BNQD.transpose(1, 2).flatten(2)
        read: Tensor = self.output(y_BQH if x_BQH is not None else layout.take(y_BQH))
        return read
