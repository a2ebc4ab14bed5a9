"""Single tokens (Devlin et al. 2019, section 3.1)."""

import dataclasses

import numpy as np
import numpy.typing as npt

from clozelab.data.masking.selection import Bools, Ints, Selection, numbered
from clozelab.data.tokenizers import Tokenizer
from clozelab.options import option


@option("masking/selection", "token")
@dataclasses.dataclass
class TokenSelection(Selection):
    """Every token is a unit of its own."""

    needs_words = False
    needs_draws = False

    def units(
        self,
        ids_BS: Ints,
        maskable_BS: Bools,
        starts_word_BS: Bools,
        tokenizer: Tokenizer,
        draws_BS: npt.NDArray[np.uint64],
    ) -> Ints:
        return numbered(np.ones_like(maskable_BS), maskable_BS)
