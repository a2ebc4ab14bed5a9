"""SEGMENT-PAIR (Liu et al. 2019, section 4.2; the input of BERT and ALBERT): [CLS] A [SEP] B [SEP].

A segment is a run of whole sentences within a budget of (max_length - 3) // 2 tokens; what of it lies beyond the budget
is cut off. Each document is cut into segments once, from its start. Segments (0, 1), (2, 3), ... of a document are the
examples, the same in every epoch. So a segment is cut before anybody knows whether it will stand first or second, next
or random, in order or swapped; pairs are never truncated, which in BERT's own data made long pairs "random". How a cut
can give labels away all the same: `data.cutting`.
"""

import dataclasses

import numpy as np

from clozelab.data.cutting import Cut, Segments, cut_documents, greedy, reach
from clozelab.data.examples import Examples
from clozelab.data.format import FormatOption, nothing
from clozelab.data.rows import RowStyle
from clozelab.data.store import Store
from clozelab.options import option

CUTS: dict[str, Cut] = {"greedy": greedy, "reach": reach}


@option("format", "segment_pair")
@dataclasses.dataclass
class SegmentPair(FormatOption):
    """Two adjacent runs of whole sentences, each within half of the sequence."""

    cut: str = "reach"
    """Where a segment ends: greedy (before the sentence that does not fit) or reach (after 3/5 of the budget)."""
    short_seq_prob: float = 0.0
    """Share of segments that are shorter than they could be (BERT: 0.1 of its pairs)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cut not in CUTS:
            raise ValueError(f"format.cut is {self.cut}; give one of {', '.join(CUTS)}")
        if not 0 <= self.short_seq_prob <= 1:
            raise ValueError(f"format.short_seq_prob is {self.short_seq_prob}; give a share from 0 to 1")

    @property
    def style(self) -> RowStyle:
        return RowStyle(segments=True, apart=False)

    @property
    def budget(self) -> int:
        """Tokens that a segment may have."""
        return (self.max_length - 3) // 2

    def examples(self, store: Store, split: str) -> Examples:
        segments = cut_documents(store, split, CUTS[self.cut], self.budget, self.short_seq_prob)
        made = paired(store, split, segments)
        if made.n == 0:
            raise nothing(store, split, "segment pair", f"more than {self.budget} tokens")
        return made


def paired(store: Store, split: str, segments: Segments) -> Examples:
    """Segments (0, 1), (2, 3), ... of each document."""
    pairs_D = segments.counts // 2
    base_D = np.cumsum(segments.counts) - segments.counts
    # Two segments a pair, and before a document's first one whatever was left over of the documents before it.
    first_N = np.repeat(base_D - 2 * (np.cumsum(pairs_D) - pairs_D), pairs_D)
    first_N += 2 * np.arange(len(first_N))
    return Examples(
        segments=segments.tokens,
        segment_document=segments.document,
        first=first_N,
        sizes=np.full(len(first_N), 2),
        content=np.repeat(store.document_hashes[segments.documents], pairs_D),
        counts={
            "documents": len(segments.documents),
            "skipped_documents": int((segments.counts < 2).sum()),
            "segments": len(segments.tokens),
            "leftover_segments": len(segments.tokens) - 2 * len(first_N),
            "truncated_sentences": segments.truncated,
            "lost_tokens": segments.total - segments.kept,
            "tokens": segments.kept,
            "sequences": len(first_N),
        },
        split=split,
        corpus=store.corpus,
        paired=True,
    )
