"""Token, position and segment embeddings, normalised, and their projection to the hidden size.

    x = project(dropout(norm(token + position + segment)))

The projection exists when the embedding size E differs from the hidden size H (ALBERT, Lan et al. 2020, section 3.1;
with E = H there is none, as in the authors' code).

Shapes: B sequences, S positions, E embedding, H hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from clozelab.models.dropout import dropout
from clozelab.models.dtype import compute_dtype
from clozelab.models.linear import Linear


class _TiedLookup(torch.autograd.Function):
    """(rows of W at the ids, W for the output layer).

    W is used twice, and its two gradients meet here: the few rows that were looked up are added onto the dense
    gradient of the output layer, which spares a second dense matrix that is nearly all zeros.
    """

    @staticmethod
    def forward(ctx: Any, weight_VE: Tensor, ids_BS: Tensor, pad_id: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids_BS)
        ctx.set_materialize_grads(False)
        ctx.pad_id, ctx.shape = pad_id, weight_VE.shape
        return weight_VE[ids_BS], weight_VE.view_as(weight_VE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        (ids_BS,) = ctx.saved_tensors
        drows_BSE, dweight_VE = grads
        if drows_BSE is not None:
            if dweight_VE is None:
                dweight_VE = drows_BSE.new_zeros(ctx.shape)
            # As in nn.Embedding, looking up the padding row teaches it nothing.
            drows_BSE = drows_BSE * (ids_BS != ctx.pad_id)[:, :, None]
            dweight_VE.index_add_(0, ids_BS.flatten(), drows_BSE.flatten(0, 1))
        return dweight_VE, None, None


class Embeddings(nn.Module):
    """What a position says before it has read the others."""

    def __init__(
        self,
        vocab_size: int,
        pad_id: int,
        *,
        embedding: int,
        hidden: int,
        positions: int,
        position_offset: int,
        segments: int,
        norm_eps: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.rate = dropout
        self.position_offset = position_offset
        self.token = nn.Embedding(vocab_size, embedding, padding_idx=pad_id)
        self.position = nn.Embedding(positions + position_offset, embedding)
        self.segment = nn.Embedding(segments, embedding) if segments else None
        self.norm = nn.LayerNorm(embedding, norm_eps)
        self.project = Linear(embedding, hidden) if embedding != hidden else nn.Identity()

    def tied_lookup(self, ids_BS: Tensor) -> tuple[Tensor, Tensor]:
        """(token vectors [B, S, E], token embedding [V, E] for an output layer that shares it in the same pass)."""
        pad_id = self.token.padding_idx
        assert pad_id is not None
        both: tuple[Tensor, Tensor] = _TiedLookup.apply(  # type: ignore[no-untyped-call]
            self.token.weight, ids_BS, pad_id
        )
        return both

    def forward(self, token_BSE: Tensor, segment_ids_BS: Tensor) -> Tensor:
        """[B, S, H] from token vectors. With one segment every position is in it, whatever segment_ids say."""
        first, length = self.position_offset, token_BSE.shape[1]
        x_BSE = token_BSE + self.position.weight[first : first + length]
        if self.segment is not None:
            many = self.segment.num_embeddings > 1
            x_BSE = x_BSE + (self.segment(segment_ids_BS) if many else self.segment.weight[0])
        x_BSE = self.norm(x_BSE)
        # From here on the stream has the dtype of the products: under autocast nothing is converted back and forth.
        x_BSE = dropout(x_BSE.to(compute_dtype(x_BSE)), self.rate, self.training)
        x_BSH: Tensor = self.project(x_BSE)
        return x_BSH
