"""DOC-SENTENCES (Liu et al. 2019, section 4.2): [CLS] sentences [SEP], never across a document's border.

Sequences at the end of a document are shorter; `batch_tokens` in place of `batch_size` lets a step see as many tokens.
"""

import dataclasses

import numpy as np

from clozelab.data.cutting import Segments, cut_documents, greedy
from clozelab.data.examples import Examples
from clozelab.data.format import FormatOption, nothing
from clozelab.data.store import Store
from clozelab.options import option


@option("format", "doc_sentences")
@dataclasses.dataclass
class DocSentences(FormatOption):
    """As many whole sentences of one document as fit; of a longer sentence the rest is cut off."""

    def examples(self, store: Store, split: str) -> Examples:
        segments = cut_documents(store, split, greedy, self.max_length - 2)
        if len(segments.tokens) == 0:
            raise nothing(store, split, "sequence", "a sentence")
        return grouped(store, split, segments, np.ones(len(segments.tokens), dtype=np.int64))


def grouped(store: Store, split: str, segments: Segments, sizes_N: np.ndarray) -> Examples:
    """Examples of so many successive segments each."""
    first_N = np.cumsum(sizes_N) - sizes_N
    document_M = segments.document
    return Examples(
        segments=segments.tokens,
        segment_document=document_M,
        first=first_N,
        sizes=sizes_N,
        content=np.asarray(store.document_hashes[document_M[first_N]]),
        counts={
            "documents": len(segments.documents),
            "skipped_documents": int((segments.counts < 1).sum()),
            "segments": len(segments.tokens),
            "leftover_segments": 0,
            "truncated_sentences": segments.truncated,
            "lost_tokens": segments.total - segments.kept,
            "tokens": segments.kept,
            "sequences": len(first_N),
        },
        split=split,
        corpus=store.corpus,
        paired=False,
    )
