"""Runs of words whose lengths follow a law: what n-gram and span masking have in common.

The papers draw a place and a length and try again where the run overlaps another. Here a row's words are parted into
runs one after another, each as long as the law says, and whole runs are drawn like words: the lengths follow the law
without a correction, every word is as likely as every other, and no run overlaps another. What a row's end or the
masked words' number cuts short is left out of neither.
"""

import numpy as np
import numpy.typing as npt

from clozelab.data.masking.selection import Bools, Ints, Selection, numbered
from clozelab.data.tokenizers import Tokenizer


class RunSelection(Selection):
    """Runs of words as units; an option of this kind says how long they are."""

    @property
    def law(self) -> npt.NDArray[np.float64]:
        """[longest]: the probability of a run of 1, 2, ... words."""
        raise NotImplementedError

    def units(
        self,
        ids_BS: Ints,
        maskable_BS: Bools,
        starts_word_BS: Bools,
        tokenizer: Tokenizer,
        draws_BS: npt.NDArray[np.uint64],
    ) -> Ints:
        B, S = maskable_BS.shape
        after_gap_BS = np.ones_like(maskable_BS)
        after_gap_BS[:, 1:] = ~maskable_BS[:, :-1]
        begins_word_BS = maskable_BS & (starts_word_BS | after_gap_BS)
        words_B = np.count_nonzero(begins_word_BS, axis=1)
        word_N = np.flatnonzero(begins_word_BS)  # where the words of all rows begin
        begin_BW = _begins(self.law, draws_BS, int(words_B.max(initial=0)))
        # A run of words never goes on behind what is not text (the border of two segments): `numbered` sees to that.
        run_begins_BS = np.zeros((B, S), dtype=bool)
        base_B1 = (np.cumsum(words_B) - words_B)[:, None]
        run_begins_BS.ravel()[word_N[(begin_BW + base_B1)[begin_BW < words_B[:, None]]]] = True
        return numbered(run_begins_BS, maskable_BS)


def _begins(law: npt.NDArray[np.float64], draws_BS: npt.NDArray[np.uint64], words: int) -> Ints:
    """[B, W]: the word with which each run of a row begins; the last runs begin at `words` or behind."""
    mean = float(law @ np.arange(1, len(law) + 1))
    wide = min(words, int(words / mean * 1.5) + 8)
    while True:
        uniform_BW = (draws_BS[:, :wide] >> np.uint64(11)).astype(np.float64) * 2.0**-53
        # As `searchsorted`, which is slower for the few lengths that laws have.
        length_BW = np.ones(uniform_BW.shape, dtype=np.int64)
        for edge in np.cumsum(law)[:-1].tolist():
            length_BW += uniform_BW >= edge
        end_BW = np.cumsum(length_BW, axis=1)
        if wide == words or end_BW[:, -1].min(initial=words) >= words:
            return end_BW - length_BW
        wide = min(words, 2 * wide)  # runs were shorter than one could expect
