"""Whole words (the later releases of BERT; Cui et al. 2021 for Chinese)."""

import dataclasses

import numpy as np
import numpy.typing as npt

from clozelab.data.masking.selection import Bools, Ints, Selection, numbered
from clozelab.data.tokenizers import Tokenizer
from clozelab.options import option


@option("masking/selection", "whole_word")
@dataclasses.dataclass
class WholeWordSelection(Selection):
    """The pieces of a word are one unit."""

    needs_draws = False

    def units(
        self,
        ids_BS: Ints,
        maskable_BS: Bools,
        starts_word_BS: Bools,
        tokenizer: Tokenizer,
        draws_BS: npt.NDArray[np.uint64],
    ) -> Ints:
        return numbered(starts_word_BS, maskable_BS)
