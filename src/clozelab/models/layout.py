"""Where the tokens of a batch stand, and the two forms in which a batch passes through the encoder.

    padded     [B, S, X]   the grid as it came
    unpadded   [T, X]      the tokens alone, one after another (Zeng et al. 2022; ModernBERT, Warner et al. 2024)

Embeddings, norms, linear layers and residual streams work on either. Attention alone needs the grid: `spread` lays the
tokens out on it, no wider than the longest sequence, and `take` picks them up again.

Shapes: B sequences, S positions, T tokens, X anything.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

# On a CPU a batch is unpadded where less than this share of it is tokens; above it, moving them costs more than it
# saves.
WORTH_UNPADDING = 0.8


class _Spread(torch.autograd.Function):
    """[places, X] of [T, X]: row t to place at[t], zeros elsewhere. (torch's own gradient of a row selection adds.)"""

    @staticmethod
    def forward(ctx: Any, x_TX: Tensor, at_T: Tensor, places: int) -> Tensor:
        ctx.save_for_backward(at_T)
        return x_TX.new_zeros(places, x_TX.shape[1]).index_copy_(0, at_T, x_TX)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (at_T,) = ctx.saved_tensors
        return grads[0].index_select(0, at_T), None, None


class _Take(torch.autograd.Function):
    """[T, X] of [places, X]: the inverse; at[t] are all different."""

    @staticmethod
    def forward(ctx: Any, x_PX: Tensor, at_T: Tensor) -> Tensor:
        ctx.save_for_backward(at_T)
        ctx.places = len(x_PX)
        return x_PX.index_select(0, at_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (at_T,) = ctx.saved_tensors
        dx_TX = grads[0]
        return dx_TX.new_zeros(ctx.places, dx_TX.shape[1]).index_copy_(0, at_T, dx_TX), None


class Layout(NamedTuple):
    """Where the tokens of a batch stand. Made by `layout_of`."""

    batch: int
    """B."""
    length: int
    """S, padding included; of an unpadded batch the length of its longest sequence."""
    position_BS: Tensor
    """[B, S] position of each token in its sequence, or [1, S] where all rows have the same."""
    mask_BS: Tensor | None
    """[B, S] bool, False = padding; None: no padding."""
    document_BS: Tensor | None
    """[B, S]: tokens see each other only where these numbers are equal; None: one sequence a row."""
    at_T: Tensor | None
    """[T] place b S + s of each token of an unpadded batch; None: padded."""

    def flat(self, x_BS: Tensor) -> Tensor:
        """[B, S, ...] as the batch passes through the encoder: itself, or [T, ...] (of its first S columns)."""
        if self.at_T is None:
            return x_BS
        x_BS = x_BS[:, : self.length].expand(self.batch, *x_BS[:, : self.length].shape[1:])
        return x_BS.flatten(0, 1).index_select(0, self.at_T)

    def spread(self, x: Tensor) -> Tensor:
        """[B, S, X] of what passes through the encoder; zeros at padding."""
        if self.at_T is None:
            return x
        grid: Tensor = _Spread.apply(x, self.at_T, self.batch * self.length)  # type: ignore[no-untyped-call]
        return grid.view(self.batch, self.length, -1)

    def take(self, x_BSX: Tensor) -> Tensor:
        """The inverse of `spread`."""
        if self.at_T is None:
            return x_BSX
        taken: Tensor = _Take.apply(x_BSX.flatten(0, 1), self.at_T)  # type: ignore[no-untyped-call]
        return taken


def layout_of(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    unpad: bool | None = None,
) -> Layout:
    """The layout of a batch.

    Args:
        input_ids: [B, S].
        attention_mask: [B, S] bool, False = padding; None = no padding.
        position_ids: [B, S] position of each token; None: counted from 0 in every row.
        document_ids: [B, S]: a token attends only to tokens with its own number; None: to its whole row.
        unpad: pass the tokens alone through the encoder; None: on a CPU where it pays, elsewhere never (asking how much
            is padding would make a GPU wait).
    """
    batch, length = input_ids.shape
    mask_BS = attention_mask
    at_T = None
    eager_cpu = input_ids.device.type == "cpu" and not torch.compiler.is_compiling()
    if mask_BS is not None and (unpad or (unpad is None and eager_cpu)):
        tokens = int(mask_BS.sum())
        if tokens == batch * length:
            mask_BS = None
        elif tokens and (unpad or tokens < WORTH_UNPADDING * batch * length):
            longest = int(mask_BS.any(0).nonzero()[-1]) + 1
            length, mask_BS = longest, mask_BS[:, :longest]
            at_T = mask_BS.flatten().nonzero()[:, 0]
            document_ids = None if document_ids is None else document_ids[:, :longest]
            position_ids = None if position_ids is None else position_ids[:, :longest]
    if position_ids is None:
        position_ids = torch.arange(length, device=input_ids.device)[None]
    return Layout(batch, length, position_ids, mask_BS, document_ids, at_T)
