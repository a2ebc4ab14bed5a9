"""FULL-SENTENCES (Liu et al. 2019, section 4.2): [CLS] sentences [SEP], on across documents, with a [SEP] between them.

    [CLS] the end of a document [SEP] the next one's beginning [SEP]

All of a row sees all of it.
"""

import dataclasses

import numpy as np

from clozelab.data.cutting import Segments
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
        documents_D = store.documents_of(split)
        first_D, last_D = store.document_offsets[documents_D], store.document_offsets[documents_D + 1]
        count_D = np.asarray(last_D - first_D, dtype=np.int64)
        if count_D.sum() == 0:
            raise nothing(store, split, "sequence", "a sentence")
        document_N = np.repeat(np.arange(len(documents_D)), count_D)
        nth_N = np.arange(len(document_N)) - np.repeat(np.cumsum(count_D) - count_D, count_D)
        sentence_N = first_D[document_N] + nth_N
        begin_N, end_N = store.sentence_offsets[sentence_N], store.sentence_offsets[sentence_N + 1]
        budget = self.max_length - 2
        length_N = np.minimum(end_N - begin_N, budget)
        # A document that begins inside a row costs a [SEP]; the row's first one costs nothing.
        border_N = (nth_N == 0).astype(np.int64)
        ends_N = np.concatenate([[0], np.cumsum(length_N + border_N)])
        next_N = (np.searchsorted(ends_N, ends_N[:-1] + budget + border_N, side="right") - 1).tolist()
        rows = [0]
        while rows[-1] < len(next_N):
            rows.append(next_N[rows[-1]])
        # A segment is what a row has of one document: it begins with a row or with a document.
        is_row_N = np.zeros(len(document_N), dtype=bool)
        is_row_N[rows[:-1]] = True
        (start_M,) = np.nonzero(is_row_N | (nth_N == 0))
        last_M = np.append(start_M[1:], len(document_N)) - 1
        truncated_M = (end_N - begin_N > budget)[start_M]  # such a sentence fills a row alone
        until_M = np.where(truncated_M, begin_N[start_M] + budget, end_N[last_M])
        segments = Segments(
            tokens=np.stack([begin_N[start_M], until_M], axis=1).astype(np.int64),
            documents=documents_D,
            counts=np.bincount(document_N[start_M], minlength=len(documents_D)),
            total=int((end_N - begin_N).sum()),
            truncated=int(truncated_M.sum()),
        )
        row_begin_M = np.flatnonzero(is_row_N[start_M])
        return grouped(store, split, segments, np.diff(np.append(row_begin_M, len(start_M))))
