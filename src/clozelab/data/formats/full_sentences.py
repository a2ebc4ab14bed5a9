"""FULL-SENTENCES (Liu et al. 2019, section 4.2): [CLS] sentences [SEP], on across documents, with a [SEP] between them.

    [CLS] the end of a document [SEP] the next one's beginning [SEP]

All of a row sees all of it.
"""

import dataclasses

import numpy as np

from clozelab.data.cutting import Ints, Segments, Sentences, joined, rows_in_blocks
from clozelab.data.examples import Examples
from clozelab.data.format import FormatOption, nothing
from clozelab.data.formats.doc_sentences import grouped
from clozelab.data.store import Store
from clozelab.options import option


@option("format", "full_sentences")
@dataclasses.dataclass
class FullSentences(FormatOption):
    """As many whole sentences as fit, from as many documents as it takes; of a longer sentence the rest is cut off."""

    def examples(self, store: Store, split: str) -> Examples:
        sentences = Sentences(store, split)
        if sentences.total == 0:
            raise nothing(store, split, "sequence", "a sentence")
        budget = self.max_length - 2

        def next_of(first: int, last: int) -> Ints:
            span = sentences.span(first, last)
            # A document that begins inside a row costs a [SEP]; the row's first one costs nothing.
            border_N = span.opens.astype(np.int64)
            ends_N = np.cumsum(np.minimum(span.end - span.begin, budget) + border_N)
            before_N = np.concatenate([[0], ends_N[:-1]])
            return np.searchsorted(ends_N, before_N + budget + border_N, side="right")

        found: list[Ints] = []
        sizes: list[Ints] = []
        counts_D = np.zeros(len(sentences.documents), dtype=np.int64)
        total = truncated = 0
        for first, last, rows in rows_in_blocks(sentences.total, next_of):
            span = sentences.span(first, last)
            # A segment is what a row has of one document: it begins with a row or with a document.
            is_row_N = np.zeros(last - first, dtype=bool)
            is_row_N[rows] = True
            start_M = np.flatnonzero(is_row_N | span.opens)
            begin_M, end_M = span.begin[start_M], span.end[np.append(start_M[1:], last - first) - 1]
            truncated_M = span.end[start_M] - begin_M > budget  # such a sentence fills a row alone
            found.append(np.stack([begin_M, np.where(truncated_M, begin_M + budget, end_M)], axis=1))
            sizes.append(np.diff(np.append(np.flatnonzero(is_row_N[start_M]), len(start_M))))
            d = int(span.document[0])
            count_D = np.bincount(span.document[start_M] - d)
            counts_D[d : d + len(count_D)] += count_D  # a document's rows may lie in several blocks
            total += int((span.end - span.begin).sum())
            truncated += int(truncated_M.sum())
        segments = Segments(joined(found), sentences.documents, counts_D, total, truncated)
        return grouped(store, split, segments, np.concatenate(sizes))
