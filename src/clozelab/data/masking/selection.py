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


class Selection:
    """What an option of the group `masking/selection` can do."""

    needs_words: ClassVar[bool] = True
    """Whether the units are made of words: then the tokenizer must know where they begin."""

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
            draws_BS: 64 random bits for every position, this selection's own.
        """
        raise NotImplementedError


def numbered(first_BS: Bools, maskable_BS: Bools) -> Ints:
    """[B, S] numbers of units that begin where `first` says, and wherever text follows what is not text."""
    after_gap_BS = np.ones_like(maskable_BS)
    after_gap_BS[:, 1:] = ~maskable_BS[:, :-1]
    begins_BS = maskable_BS & (first_BS | after_gap_BS)
    return np.where(maskable_BS, np.cumsum(begins_BS, axis=1) - 1, -1)


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
    here_BS = unit_BS >= 0
    flat_BS = unit_BS + np.arange(B)[:, None] * U
    length_BU = np.bincount(flat_BS[here_BS], minlength=B * U).reshape(B, U)
    order_BU = np.argsort(np.where(length_BU > 0, draws_BS[:, :U], ~np.uint64(0)), axis=1, kind="stable")
    length_BU = np.take_along_axis(length_BU, order_BU, axis=1)
    left_B1 = count_B[:, None].copy()
    taken_BU = np.zeros((B, U), dtype=bool)
    live_BU = length_BU > 0
    # One pass takes units up to the first that does not fit. That one and all that are as long are passed over for good
    # (what is left only shrinks), and the next pass goes on behind it: in all, what one would do unit by unit.
    while True:
        live_BU &= length_BU <= left_B1
        if not live_BU.any():
            break
        total_BU = np.cumsum(np.where(live_BU, length_BU, 0), axis=1)
        fits_BU = live_BU & (total_BU <= left_B1)
        taken_BU |= fits_BU
        left_B1 -= np.where(fits_BU, length_BU, 0).sum(axis=1, keepdims=True)
        live_BU &= ~fits_BU
    chosen_BU = np.zeros((B, U), dtype=bool)
    np.put_along_axis(chosen_BU, order_BU, taken_BU, axis=1)
    chosen_BS: Bools = chosen_BU.ravel()[np.where(here_BS, flat_BS, 0)] & here_BS
    (bare_R,) = np.nonzero(~taken_BU.any(axis=1) & (count_B > 0) & (length_BU[:, 0] > 0))
    if len(bare_R):
        # No unit is short enough: the first in the order is cut to the row's number, as SpanBERT cuts its last span.
        of_first_RS = unit_BS[bare_R] == order_BU[bare_R, :1]
        chosen_BS[bare_R] = of_first_RS & (np.cumsum(of_first_RS, axis=1) <= count_B[bare_R, None])
    return chosen_BS
