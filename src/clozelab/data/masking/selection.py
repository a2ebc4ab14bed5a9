"""Selections: what is hidden together.

A selection parts a row into units; whole units are then drawn until a row has its number of targets.

Every unit of a row is as likely as every other. They are taken in a random order, and one that is longer than what is
left to take is passed over (BERT's rule for whole words), so a row never has more targets than it should, and fewer
only where no other unit fits.

Shapes: B rows, S positions, K target slots, U units of the row that has most.
"""

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from clozelab.data.tokenizers import Tokenizer

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_AT_ONCE = 32  # units of a row that are looked at before asking whether all rows have what they need


class Selection:
    """What an option of the group `masking/selection` can do."""

    needs_words: ClassVar[bool] = True
    """Whether the units are made of words: then the tokenizer must know where they begin."""
    needs_draws: ClassVar[bool] = True
    """Whether the units are drawn; where they are not, `units` is given no draws to look at."""

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise ValueError where the tokenizer cannot carry this selection."""
        if self.needs_words and tokenizer.word_starts is None:
            raise ValueError(
                f"{tokenizer.origin} does not tell where words begin: masking/selection must be token, or the "
                "tokenizer WordPiece or byte-level BPE"
            )

    def units(
        self,
        ids_BS: Ints,
        maskable_BS: Bools,
        starts_word_BS: Bools,
        tokenizer: Tokenizer,
        draws_BS: npt.NDArray[np.uint64],
    ) -> Ints:
        """[B, S]: number of each position's unit, from 0 in each row and rising along it; -1 where nothing may be
        masked.

        Args:
            ids_BS: the sequences.
            maskable_BS: True at text.
            starts_word_BS: True where a word begins; looked at only at text.
            tokenizer: theirs.
            draws_BS: 64 random bits for every position, this selection's own; zeros without `needs_draws`.
        """
        raise NotImplementedError


def numbered(first_BS: Bools, maskable_BS: Bools) -> Ints:
    """[B, S] numbers of units that begin where `first` says, and wherever text follows what is not text."""
    after_gap_BS = np.ones_like(maskable_BS)
    after_gap_BS[:, 1:] = ~maskable_BS[:, :-1]
    begins_BS = maskable_BS & (first_BS | after_gap_BS)
    number_BS: Ints = np.cumsum(begins_BS, axis=1)
    number_BS *= maskable_BS
    number_BS -= 1
    return number_BS


def choose(unit_BS: Ints, count_B: Ints, draws_BS: npt.NDArray[np.uint64]) -> Bools:
    """[B, S]: True at the positions of the units drawn.

    Args:
        unit_BS: as `Selection.units` gives them.
        count_B: positions that each row should get.
        draws_BS: random bits; unit u of a row is ordered by the u-th of them.
    """
    B, S = unit_BS.shape
    U = int(unit_BS.max(initial=-1)) + 1
    if U == 0:
        return np.zeros((B, S), dtype=bool)
    # Units by one number; what may not be masked counts towards one more that no row has.
    flat_BS = np.where(unit_BS >= 0, unit_BS + np.arange(B)[:, None] * U, B * U)
    length_BU = np.bincount(flat_BS.ravel(), minlength=B * U + 1)[:-1].reshape(B, U)
    # A unit's number rides in the low bits of its own draw: one sort of plain numbers gives the order and no ties.
    low = np.uint64((1 << U.bit_length()) - 1)
    order_BU = (draws_BS[:, :U] & ~low) | np.arange(U, dtype=np.uint64)
    order_BU[length_BU == 0] = ~np.uint64(0)
    order_BU.sort(axis=1)
    left_B = count_B.astype(np.int64)
    taken: list[Ints] = []
    any_B = np.zeros(B, dtype=bool)
    for begin in range(0, U, _AT_ONCE):
        # Turned, so that what is done to all rows at once lies together. A row that lacks units lacks the last of U,
        # which stands in for them: its length is 0.
        part_WB = np.minimum((order_BU[:, begin : begin + _AT_ONCE].T & low).astype(np.int64), U - 1)
        part_WB += np.arange(B) * U
        length_WB = length_BU.ravel()[part_WB]
        taken_WB = np.zeros(part_WB.shape, dtype=bool)
        for length_B, taken_B in zip(length_WB, taken_WB, strict=True):
            np.less_equal(length_B, left_B, out=taken_B)
            left_B -= length_B * taken_B
        taken_WB &= length_WB > 0
        any_B |= taken_WB.any(axis=0)
        taken.append(part_WB[taken_WB])
        if not left_B.any():
            break
    chosen = np.zeros(B * U + 1, dtype=bool)
    chosen[np.concatenate(taken)] = True
    chosen_BS: Bools = chosen.take(flat_BS)
    (bare_R,) = np.nonzero(~any_B & (count_B > 0) & (length_BU[:, 0] > 0))
    if len(bare_R):
        # No unit is short enough: the first in the order is cut to the row's number, as SpanBERT cuts its last span.
        of_first_RS = unit_BS[bare_R] == (order_BU[bare_R, :1] & low).astype(np.int64)
        chosen_BS[bare_R] = of_first_RS & (np.cumsum(of_first_RS, axis=1) <= count_B[bare_R, None])
    return chosen_BS
