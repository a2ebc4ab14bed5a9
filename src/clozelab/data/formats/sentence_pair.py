"""SENTENCE-PAIR (Liu et al. 2019, section 4.2): [CLS] A [SEP] B [SEP] of two adjacent single sentences.

Sequences are far shorter than a format of segments gives; `batch_tokens` in place of `batch_size` lets a step see as
many tokens.

Sentences have the lengths that their author gives them: the two lengths alone tell "next" from "random" at about 54 %
on the packaged text (about 51 % where the stranger is of the same document), and "order" not at all.
"""

import dataclasses

from clozelab.data.cutting import cut_documents, each_sentence
from clozelab.data.examples import Examples
from clozelab.data.format import FormatOption, nothing
from clozelab.data.formats.segment_pair import paired
from clozelab.data.rows import RowStyle
from clozelab.data.store import Store
from clozelab.options import option


@option("format", "sentence_pair")
@dataclasses.dataclass
class SentencePair(FormatOption):
    """Sentences (0, 1), (2, 3), ... of a document; of a sentence longer than half a sequence the rest is cut off."""

    @property
    def style(self) -> RowStyle:
        return RowStyle(segments=True, apart=False)

    def examples(self, store: Store, split: str) -> Examples:
        made = paired(store, split, cut_documents(store, split, each_sentence, (self.max_length - 3) // 2))
        if made.n == 0:
            raise nothing(store, split, "sentence pair", "two sentences")
        return made
