"""Where the tokens of a batch stand, and the two forms in which a batch passes through the encoder.

    padded     [B, S, X]   the grid as it came
    unpadded   [U, X]      the tokens alone, one after another (Zeng et al. 2022; ModernBERT, Warner et al. 2024)

Embeddings, norms, linear layers and residual streams work on either. Attention alone needs a grid: of a padded batch
its own, of an unpadded one the grid [R, L] of its sequences packed into R rows about as long as the longest of them,
where each sees only itself (Krell et al. 2021). `spread` lays the tokens out on the grid, `take` picks them up again.

A matrix product of a size that was not met before costs milliseconds (the library compiles code for it), and every
batch has another number of tokens. So T tokens are brought to a multiple U of 64 by a few that nobody reads, and L to a
multiple of 16: few sizes come back again and again.

Shapes: B sequences, S positions, R rows of L places, T tokens, U = T and a few more, X anything.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

# On a CPU a batch is unpadded where less than this share of it is tokens; above it, moving them costs more than it
# saves.
WORTH_UNPADDING = 0.8
_TOKENS, _PLACES = 64, 16


class _Spread(torch.autograd.Function):
    """[places, X] of [U, X]: row t to place at[t], zeros elsewhere. (torch's own gradient of a row selection adds.)"""

    @staticmethod
    def forward(ctx: Any, x_UX: Tensor, at_T: Tensor, places: int) -> Tensor:
        ctx.save_for_backward(at_T)
        ctx.rows = len(x_UX)
        return _put(x_UX[: len(at_T)], at_T, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (at_T,) = ctx.saved_tensors
        return _get(grads[0], at_T, ctx.rows), None, None


class _Take(torch.autograd.Function):
    """[U, X] of [places, X]: the inverse; at[t] are all different."""

    @staticmethod
    def forward(ctx: Any, x_PX: Tensor, at_T: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(at_T)
        ctx.places = len(x_PX)
        return _get(x_PX, at_T, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (at_T,) = ctx.saved_tensors
        return _put(grads[0][: len(at_T)], at_T, ctx.places), None, None


def _put(x_TX: Tensor, at_T: Tensor, places: int) -> Tensor:
    return x_TX.new_zeros(places, x_TX.shape[1]).index_copy_(0, at_T, x_TX)


def _get(x_PX: Tensor, at_T: Tensor, rows: int) -> Tensor:
    """[rows, X]: the places at[t], then zeros."""
    got = x_PX.new_empty(rows, x_PX.shape[1])
    torch.index_select(x_PX, 0, at_T, out=got[: len(at_T)])
    got[len(at_T) :].zero_()
    return got


class Unpadded(NamedTuple):
    """How the tokens of a batch lie in its grid and in that of attention."""

    from_U: Tensor
    """[U] place b S + s of each token in the batch; the few behind are copies of the first."""
    at_T: Tensor
    """[T] place r L + l of each token in the grid of attention."""
    token_BS: Tensor
    """[B, S] number of the token at each place of the batch; at padding that of some other."""


class Layout(NamedTuple):
    """Where the tokens of a batch stand. Made by `layout_of`; the fields describe the grid of attention."""

    batch: int
    """B, or R."""
    length: int
    """S, or L."""
    position_BS: Tensor
    """[B, S] position of each token in its sequence, or [1, S] where all rows have the same."""
    mask_BS: Tensor | None
    """[B, S] bool, False = padding; None: no padding, or none that a document's token could see."""
    document_BS: Tensor | None
    """[B, S]: tokens see each other only where these numbers are equal; None: one sequence a row."""
    unpadded: Unpadded | None
    """None: the batch passes as it came."""

    def flat(self, x_BS: Tensor) -> Tensor:
        """[B, S, ...] of the batch in the form in which it passes through the encoder."""
        return x_BS if self.unpadded is None else x_BS.flatten(0, 1).index_select(0, self.unpadded.from_U)

    def tokens(self, attention_mask: Tensor) -> Tensor:
        """[...] bool, of what passes through the encoder: True at the batch's tokens, each of them once."""
        if self.unpadded is None:
            return attention_mask
        place_U = torch.arange(len(self.unpadded.from_U), device=attention_mask.device)
        return place_U < len(self.unpadded.at_T)

    def positions(self) -> Tensor:
        """The position of each token in that form (padded: as far as they differ between rows)."""
        if self.unpadded is None:
            return self.position_BS
        position_T = self.position_BS.flatten().index_select(0, self.unpadded.at_T)
        return torch.nn.functional.pad(position_T, (0, len(self.unpadded.from_U) - len(position_T)))

    def spread(self, x: Tensor) -> Tensor:
        """[B, S, X] on the grid of attention, of what passes through the encoder; zeros where no token is."""
        if self.unpadded is None:
            return x
        grid: Tensor = _Spread.apply(x, self.unpadded.at_T, self.batch * self.length)  # type: ignore[no-untyped-call]
        return grid.view(self.batch, self.length, -1)

    def take(self, x_BSX: Tensor) -> Tensor:
        """The inverse of `spread`."""
        if self.unpadded is None:
            return x_BSX
        taken: Tensor = _Take.apply(  # type: ignore[no-untyped-call]
            x_BSX.flatten(0, 1), self.unpadded.at_T, len(self.unpadded.from_U)
        )
        return taken

    def pick(self, x: Tensor, place_BQ: Tensor) -> Tensor:
        """[B, Q, X] at places of the batch, of what passes through the encoder."""
        if self.unpadded is None:
            return x.gather(1, place_BQ[:, :, None].expand(-1, -1, x.shape[-1]))
        token_Q = self.unpadded.token_BS.gather(1, place_BQ).flatten()
        return x.gather(0, token_Q[:, None].expand(-1, x.shape[-1])).view(*place_BQ.shape, x.shape[-1])


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
        document_ids: [B, S], not negative: a token sees only those with its own number; None: its whole row.
        unpad: pass the tokens alone through the encoder; None: on a CPU where it pays, elsewhere never (asking how much
            is padding would make a GPU wait).
    """
    batch, length = input_ids.shape
    eager_cpu = input_ids.device.type == "cpu" and not torch.compiler.is_compiling()
    if attention_mask is not None and (unpad or (unpad is None and eager_cpu)):
        tokens = int(attention_mask.sum())
        if tokens == batch * length:
            attention_mask = None
        elif tokens and (unpad or tokens < WORTH_UNPADDING * batch * length):
            return _packed(attention_mask, position_ids, document_ids)
    if position_ids is None:
        position_ids = torch.arange(length, device=input_ids.device)[None]
    return Layout(batch, length, position_ids, attention_mask, document_ids, None)


def _packed(mask_BS: Tensor, position_ids: Tensor | None, document_ids: Tensor | None) -> Layout:
    """The layout of a batch without its padding."""
    batch, length = mask_BS.shape
    device = mask_BS.device
    length_B = mask_BS.sum(1)
    longest = -(-int(length_B.max()) // _PLACES) * _PLACES
    row_B, start_B, rows = _first_fit(length_B.tolist(), longest)
    sequence_T, place_T = mask_BS.nonzero(as_tuple=True)
    from_T = sequence_T * length + place_T
    token_BS = (mask_BS.flatten().cumsum(0) - 1).clamp(min=0).view(batch, length)
    # The n-th token of a sequence lies n places behind the sequence's start in its row.
    order_T = torch.arange(len(from_T), device=device) - (length_B.cumsum(0) - length_B)[sequence_T]
    at_T = (torch.tensor(row_B, device=device) * longest + torch.tensor(start_B, device=device))[sequence_T] + order_T
    position_T = place_T if position_ids is None else position_ids.flatten()[from_T]
    document_T = sequence_T
    if document_ids is not None:
        document_T = sequence_T * (int(document_ids.max()) + 1) + document_ids.flatten()[from_T]
    position_P = torch.zeros(rows * longest, dtype=torch.int64, device=device)
    document_P = torch.full_like(position_P, -1)
    position_P[at_T], document_P[at_T] = position_T, document_T
    grid = (rows, longest)
    from_U = torch.cat([from_T, from_T[:1].expand(-len(from_T) % _TOKENS)])
    return Layout(*grid, position_P.view(grid), None, document_P.view(grid), Unpadded(from_U, at_T, token_BS))


def _first_fit(lengths: list[int], room: int) -> tuple[list[int], list[int], int]:
    """(row and start of each sequence, number of rows): the longest first, each into the first row that has room."""
    used: list[int] = []
    row_of, start_of = [0] * len(lengths), [0] * len(lengths)
    for n in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        row = next((row for row, taken in enumerate(used) if taken + lengths[n] <= room), len(used))
        if row == len(used):
            used.append(0)
        row_of[n], start_of[n] = row, used[row]
        used[row] += lengths[n]
    return row_of, start_of, len(used)
