"""PACKED: whole documents, or pieces of them, side by side in a row, each seeing itself alone (Krell et al. 2021).

    [CLS] document [SEP] [CLS] next document [SEP] ...

Positions restart with every piece, and a block mask keeps pieces apart: the same numbers as if each stood in a row of
its own, without the padding.
"""

import dataclasses

import numpy as np

from clozelab.data.cutting import Ints, cut_documents, greedy, rows_in_blocks
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

        def next_of(first: int, last: int) -> Ints:
            # The next row begins with the first piece that does not fit into this one.
            tokens_M2 = segments.tokens[first:last]
            size_M = tokens_M2[:, 1] - tokens_M2[:, 0] + 2
            ends_M = np.cumsum(size_M)
            next_M: Ints = np.searchsorted(ends_M, ends_M - size_M + self.max_length, side="right")
            return next_M

        sizes = [
            np.diff(np.append(begins, last - first))
            for first, last, begins in rows_in_blocks(len(segments.tokens), next_of)
        ]
        return grouped(store, split, segments, np.concatenate(sizes))
