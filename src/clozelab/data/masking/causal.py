"""Causal language modelling (Radford et al. 2018, section 3.1; BERT's left-to-right ablation, Devlin et al. 2019,
section 5.1): every token is predicted from those before it, and nothing is hidden.

The shift happens here and nowhere else: the target of place p is the token at p + 1. The separator at the end of a text
is a target like any other; what stands first, and padding, are none.

Shapes: B rows, S positions.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from clozelab.data.masking.cloze import IGNORED, Masked
from clozelab.data.masking.selection import Bools, Ints
from clozelab.data.tokenizers import Tokenizer
from clozelab.options import option


@option("masking", "causal")
@dataclasses.dataclass
class CausalTargets:
    """The next token, at every place."""

    causal: ClassVar[bool] = True
    by_step: ClassVar[bool] = False
    needs_words: ClassVar[bool] = False

    def check(self, tokenizer: Tokenizer) -> None:
        """Every tokenizer will do."""

    def targets(self, max_length: int) -> int:
        """K: every place but the last."""
        return max_length - 1

    def __call__(
        self,
        ids_BS: Ints,
        maskable_BS: Bools,
        tokenizer: Tokenizer,
        *,
        seed: int,
        epoch: int,
        example_ids: Ints,
        stream: str = "mask",
        step: int = 0,
        starts_word_BS: Bools | None = None,
    ) -> Masked:
        """(input_ids [B, S], target_positions [B, S - 1], target_ids [B, S - 1]); the draws play no part."""
        next_BK = ids_BS[:, 1:]
        # The token that opens a sequence of its own inside a row follows from nothing before it.
        asked_BK = (next_BK != tokenizer.pad_id) & (next_BK != tokenizer.cls_id)
        at_BK = np.broadcast_to(np.arange(ids_BS.shape[1] - 1), next_BK.shape)
        return ids_BS.copy(), np.where(asked_BK, at_BK, 0), np.where(asked_BK, next_BK, IGNORED)
