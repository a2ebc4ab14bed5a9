"""Runs of words whose lengths follow a law: what n-gram and span masking have in common.

The papers draw a place and a length and try again where the run overlaps another. Here a row's words are parted into
runs one after another, each as long as the law says, and whole runs are drawn like words: the lengths follow the law
without a correction, every word is as likely as every other, and no run overlaps another. What a row's end or the
masked words' number cuts short is left out of neither.
"""

import numpy as np
import numpy.typing as npt

from clozelab.data.masking.selection import Bools, Ints, numbered


def run_units(
    starts_word_BS: Bools,
    maskable_BS: Bools,
    law: npt.NDArray[np.float64],
    draws_BS: npt.NDArray[np.uint64],
) -> Ints:
    """[B, S] numbers of runs of words; `law[n - 1]` is the probability of a run of n words."""
    B = len(maskable_BS)
    word_BS = numbered(starts_word_BS, maskable_BS)
    words = int(word_BS.max(initial=-1)) + 1
    if words == 0:
        return word_BS
    uniform_BW = (draws_BS[:, :words] >> np.uint64(11)).astype(np.float64) * 2.0**-53
    length_BW = np.minimum(np.searchsorted(np.cumsum(law), uniform_BW, side="right"), len(law) - 1) + 1
    begin_BW = np.cumsum(length_BW, axis=1) - length_BW
    begins_BW = np.zeros((B, words + 1), dtype=bool)
    np.put_along_axis(begins_BW, np.minimum(begin_BW, words), True, axis=1)
    # A run of words never goes on behind what is not text (the border of two segments).
    first_word_BS = np.diff(word_BS, axis=1, prepend=-1) != 0
    after_gap_BS = np.ones_like(maskable_BS)
    after_gap_BS[:, 1:] = ~maskable_BS[:, :-1]
    run_begins_BS = np.take_along_axis(begins_BW, np.maximum(word_BS, 0), axis=1) & first_word_BS
    return numbered(run_begins_BS | after_gap_BS, maskable_BS)
