"""Token, position and segment embeddings, normalised, and their projection to the hidden size.

    x = project(dropout(norm(token + position + segment)))

The projection exists when the embedding size E differs from the hidden size H (ALBERT, Lan et al. 2020, section 3.1;
with E = H there is none, as in the authors' code, unless the option asks for one, as Hugging Face's ALBERT has it).

Shapes: E embedding, H hidden, V vocabulary; `...` is [B, S], or [T] of an unpadded batch.
"""

from typing import Any

import torch
from torch import Tensor, nn

from clozelab.models.dropout import dropout
from clozelab.models.dtype import compute_dtype
from clozelab.models.linear import Linear
from clozelab.models.position import Position


class _TiedLookup(torch.autograd.Function):
    """(rows of W at the ids, W for the output layer).

    W is used twice, and its two gradients meet here: the few rows that were looked up are added onto the dense
    gradient of the output layer, which spares a second dense matrix that is nearly all zeros.
    """

    @staticmethod
    def forward(ctx: Any, weight_VE: Tensor, ids: Tensor, pad_id: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        ctx.set_materialize_grads(False)
        ctx.pad_id, ctx.shape = pad_id, weight_VE.shape
        return weight_VE[ids], weight_VE.view_as(weight_VE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        drows, dweight_VE = grads
        if drows is not None:
            if dweight_VE is None:
                dweight_VE = drows.new_zeros(ctx.shape)
            # As in nn.Embedding, looking up the padding row teaches it nothing.
            drows = drows * (ids != ctx.pad_id)[..., None]
            dweight_VE.index_add_(0, ids.flatten(), drows.flatten(0, -2))
        return dweight_VE, None, None


class Embedding(nn.Embedding):
    """`nn.Embedding`, whose values come from `initialise`."""

    def reset_parameters(self) -> None:
        """Draw nothing, as `models.linear.Linear`."""


class Embeddings(nn.Module):
    """What a position says before it has read the others."""

    def __init__(
        self,
        vocab_size: int,
        pad_id: int,
        *,
        embedding: int,
        hidden: int,
        position: Position,
        segments: int,
        norm: nn.Module,
        project: bool,
        bias: bool,
        dropout: float,
        stream_dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.rate = dropout
        self.stream_dtype = stream_dtype
        self.token = Embedding(vocab_size, embedding, padding_idx=pad_id)
        self.position = position
        self.segment = Embedding(segments, embedding) if segments else None
        self.norm = norm
        self.project = Linear(embedding, hidden, bias=bias) if project else nn.Identity()

    def tied_lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(token vectors [..., E], token embedding [V, E] for an output layer that shares it in the same pass)."""
        if torch.compiler.is_compiling():
            return self.token(ids), self.token.weight
        pad_id = self.token.padding_idx
        assert pad_id is not None
        both: tuple[Tensor, Tensor] = _TiedLookup.apply(  # type: ignore[no-untyped-call]
            self.token.weight, ids, pad_id
        )
        return both

    def forward(self, token: Tensor, segment_ids: Tensor, position: Tensor) -> Tensor:
        """[..., H] from token vectors [..., E], segments and positions (these may broadcast).

        With one segment every position is in it, whatever segment_ids say.
        """
        x = token
        where = self.position.embed(position)
        if where is not None:
            x = x + where
        if self.segment is not None:
            many = self.segment.num_embeddings > 1
            x = x + (self.segment(segment_ids) if many else self.segment.weight[0])
        x = self.norm(x)
        # After a norm the stream may have the dtype of the products: under autocast nothing is converted back and
        # forth. Where nothing norms the stream itself, the layers add up on it, in float32.
        x = dropout(x.to(compute_dtype(x)), self.rate, self.training)
        x_H: Tensor = self.project(x)
        return x_H if self.stream_dtype is None else x_H.to(self.stream_dtype)
