"""PACKED: whole documents, or pieces of them, side by side in a row, each seeing itself alone (Krell et al. 2021).

    [CLS] document [SEP] [CLS] next document [SEP] ...

Positions restart with every piece, and a block mask keeps pieces apart: the same numbers as if each stood in a row of
its own, without the padding.
"""

import dataclasses

import numpy as np

from clozelab.data.cutting import cut_documents, greedy
from clozelab.data.examples import Examples
from clozelab.data.format import FormatOption, nothing
from clozelab.data.formats.doc_sentences import grouped
from clozelab.data.rows import RowStyle
from clozelab.data.store import Store
from clozelab.options import option


@option("format", "packed")
@dataclasses.dataclass
class Packed(FormatOption):
    """Runs of whole sentences of one document, packed into rows in their order."""

    @property
    def style(self) -> RowStyle:
        return RowStyle(segments=False, apart=True)

    def examples(self, store: Store, split: str) -> Examples:
        segments = cut_documents(store, split, greedy, self.max_length - 2)
        if len(segments.tokens) == 0:
            raise nothing(store, split, "sequence", "a sentence")
        ends_M = np.concatenate([[0], np.cumsum(segments.tokens[:, 1] - segments.tokens[:, 0] + 2)])
        # The next row begins with the first piece that does not fit into this one.
        next_M = (np.searchsorted(ends_M, ends_M[:-1] + self.max_length, side="right") - 1).tolist()
        begins = [0]
        while begins[-1] < len(next_M):
            begins.append(next_M[begins[-1]])
        return grouped(store, split, segments, np.diff(np.asarray(begins)))
