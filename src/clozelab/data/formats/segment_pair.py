"""SEGMENT-PAIR (Liu et al. 2019, section 4.2; the input of BERT and ALBERT): [CLS] A [SEP] B [SEP].

A segment is a run of whole sentences within a budget of (max_length - 3) // 2 tokens; what of it lies beyond the budget
is cut off. Each document is cut into segments once, from its start. Segments (0, 1), (2, 3), ... of a document are the
examples, the same in every epoch. So a segment is cut before anybody knows whether it will stand first or second, next
or random, in order or swapped; pairs are never truncated, which in BERT's own data made long pairs "random".

Where a segment ends is a choice with a price:

`greedy`  before the first sentence that would not fit. Only a sentence longer than the budget loses tokens. But then B
          begins with a sentence that did *not* fit into A's rest, and a swapped or random pair often shows one that
          would have fitted: sentence lengths alone give order and next away (60% and 58% right on the packaged text).
`reach`   with the first sentence that reaches 3/5 of the budget; a rest that does not reach it is left out. Where a
          segment ends depends on nothing after it, so lengths tell nothing of the neighbour (50% and 52%, where 52%
          is the style of an author). More of the last sentences is cut off, and sequences are fuller.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from clozelab.data.examples import Examples
from clozelab.data.store import Store
from clozelab.options import option


@option("format", "segment_pair")
@dataclasses.dataclass
class SegmentPair:
    """Two adjacent runs of whole sentences, each within half of the sequence."""

    max_length: int = 128
    """Positions of a sequence, special tokens and padding included."""
    cut: str = "reach"
    """Where a segment ends: greedy (before the sentence that does not fit) or reach (after 3/5 of the budget)."""

    def __post_init__(self) -> None:
        if self.max_length < 8:
            raise ValueError(f"format.max_length is {self.max_length}; a segment pair needs at least 8 positions")
        if self.cut not in _CUTS:
            raise ValueError(f"format.cut is {self.cut}; give one of {', '.join(_CUTS)}")

    @property
    def budget(self) -> int:
        """Tokens that a segment may have."""
        return (self.max_length - 3) // 2

    def examples(self, store: Store, split: str) -> Examples:
        """Cut the documents of a split and pair their segments.

        Raises:
            ValueError: no document of the split has two segments.
        """
        documents_D = store.documents_of(split)
        cut = _CUTS[self.cut]
        firsts: list[int] = []
        nexts: list[int] = []
        counts_D = np.zeros(len(documents_D), dtype=np.int64)
        bounds_D2 = np.stack([store.document_offsets[documents_D], store.document_offsets[documents_D + 1]], axis=1)
        total = 0
        for d, (first, last) in enumerate(bounds_D2.tolist()):
            lengths_N = np.diff(store.sentence_offsets[first : last + 1])
            total += int(lengths_N.sum())
            borders = cut(lengths_N, self.budget)
            counts_D[d] = len(borders) - 1
            firsts += [first + border for border in borders[:-1]]
            nexts += [first + border for border in borders[1:]]
        begin_M = store.sentence_offsets[np.asarray(firsts, dtype=np.int64)]
        end_M = store.sentence_offsets[np.asarray(nexts, dtype=np.int64)]
        segments_M2 = np.stack([begin_M, np.minimum(end_M, begin_M + self.budget)], axis=1).astype(np.int64)
        kept = int((segments_M2[:, 1] - segments_M2[:, 0]).sum())

        pairs_D = counts_D // 2
        base_D = np.cumsum(counts_D) - counts_D
        k_N = np.arange(pairs_D.sum()) - np.repeat(np.cumsum(pairs_D) - pairs_D, pairs_D)
        pairs_N = np.repeat(base_D, pairs_D) + 2 * k_N
        if len(pairs_N) == 0:
            raise ValueError(
                f"the {split} split of corpus {store.corpus} gives no segment pair: none of its {len(documents_D)} "
                f"documents has more than {self.budget} tokens; give longer documents, a smaller format.max_length, "
                "or other corpus.validation and corpus.test shares"
            )
        counts = {
            "documents": len(documents_D),
            "skipped_documents": int((counts_D < 2).sum()),
            "segments": len(segments_M2),
            "leftover_segments": len(segments_M2) - 2 * len(pairs_N),
            "truncated_sentences": int((end_M - begin_M > self.budget).sum()),
            "lost_tokens": total - kept,
            "tokens": kept,
            "pairs": len(pairs_N),
        }
        return Examples(
            segments=segments_M2,
            segment_document=np.repeat(documents_D, counts_D),
            pairs=pairs_N,
            content=np.repeat(store.document_hashes[documents_D], pairs_D),
            counts=counts,
            split=split,
            corpus=store.corpus,
        )

    def assemble(
        self, store: Store, examples: Examples, first_B: npt.NDArray[np.int64], second_B: npt.NDArray[np.int64]
    ) -> dict[str, npt.NDArray]:
        """Sequences of the segments `first_B` and `second_B`.

        Returns:
            input_ids, segment_ids int64 [B, S]; attention_mask, maskable bool [B, S]. Maskable is text alone: no
            padding, no special token, not even one that stands in the text.
        """
        tokenizer = store.tokenizer
        B, S = len(first_B), self.max_length
        row_B = np.arange(B) * S
        # The text of the batch as R = 2B runs of tokens, A and B of each row: where each begins in store and batch.
        segment_R = np.empty(2 * B, dtype=np.int64)
        segment_R[0::2], segment_R[1::2] = first_B, second_B
        length_R, source_R = examples.lengths[segment_R], examples.segments[segment_R, 0]
        a_B, b_B = length_R[0::2], length_R[1::2]
        target_R = np.empty(2 * B, dtype=np.int64)
        target_R[0::2], target_R[1::2] = row_B + 1, row_B + a_B + 2
        before_R = np.cumsum(length_R) - length_R
        k_T = np.arange(int(length_R.sum()))
        text_T = store.ids[k_T + np.repeat(source_R - before_R, length_R)]
        at_T = k_T + np.repeat(target_R - before_R, length_R)

        ids = np.full(B * S, tokenizer.pad_id, dtype=np.int64)
        ids[at_T] = text_T
        ids[row_B] = tokenizer.cls_id
        ids[row_B + a_B + 1] = tokenizer.sep_id
        ids[row_B + a_B + b_B + 2] = tokenizer.sep_id
        maskable = np.zeros(B * S, dtype=bool)
        maskable[at_T] = ~tokenizer.is_special_V[text_T]
        p_1S, a_B1, end_B1 = np.arange(S)[None, :], a_B[:, None], (a_B + b_B + 3)[:, None]
        attention_BS = p_1S < end_B1
        return {
            "input_ids": ids.reshape(B, S),
            "segment_ids": ((p_1S >= a_B1 + 2) & attention_BS).astype(np.int64),
            "attention_mask": attention_BS,
            "maskable": maskable.reshape(B, S),
        }


def _greedy(lengths_N: npt.NDArray[np.int64], budget: int) -> list[int]:
    """Borders between segments, in sentences, from 0 to N: each segment ends before what does not fit."""
    ends_N = np.concatenate([[0], np.cumsum(np.minimum(lengths_N, budget))])
    next_N = (np.searchsorted(ends_N, ends_N[:-1] + budget, side="right") - 1).tolist()
    borders = [0]
    while borders[-1] < len(next_N):
        borders.append(next_N[borders[-1]])
    return borders


def _reach(lengths_N: npt.NDArray[np.int64], budget: int) -> list[int]:
    """Borders between segments, in sentences: each segment ends as soon as it has 3/5 of the budget."""
    ends_N = np.concatenate([[0], np.cumsum(lengths_N)])
    next_N = np.searchsorted(ends_N, ends_N[:-1] + max(1, budget * 3 // 5), side="left").tolist()
    borders = [0]
    while borders[-1] < len(next_N) and next_N[borders[-1]] <= len(next_N):
        borders.append(next_N[borders[-1]])
    return borders


_CUTS = {"greedy": _greedy, "reach": _reach}
