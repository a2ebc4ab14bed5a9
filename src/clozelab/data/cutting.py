"""Cutting documents into segments: runs of whole sentences within a budget of tokens, from each document's start.

Where a segment ends is a choice with a price:

`greedy`    before the first sentence that would not fit. Only a sentence longer than the budget loses tokens. But of
            two neighbours the second begins with a sentence that did *not* fit into the first, which a swapped or
            random pair often contradicts: sentence lengths alone give order and next away (60% and 58% right on the
            packaged text).
`reach`     with the first sentence that reaches 3/5 of the budget; a rest that does not reach it is left out. Where a
            segment ends depends on nothing after it, so lengths tell nothing of the neighbour (50% and 52%, where 52%
            is the style of an author). More of the last sentences is cut off, and sequences are fuller.
`sentence`  after every sentence.

With a share of short segments (BERT's short_seq_prob), such a segment has a budget of its own, drawn uniformly from 2
up. It is drawn for each segment, not for each pair as in BERT's data, where a random second segment is often of another
length than its first and a true one never: that gives next away too.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from clozelab import seeds
from clozelab.data.store import Store

Ints = npt.NDArray[np.int64]
# Borders between segments, in sentences from 0, of the lengths of a document's sentences and the budget at each.
Cut = Callable[[Ints, Ints], list[int]]


def greedy(lengths_N: Ints, budget_N: Ints) -> list[int]:
    """Each segment ends before what does not fit; the last border is N."""
    ends_N = np.concatenate([[0], np.cumsum(lengths_N)])
    next_N = np.searchsorted(ends_N, ends_N[:-1] + budget_N, side="right") - 1
    next_N = np.maximum(next_N, np.arange(1, len(lengths_N) + 1)).tolist()
    borders = [0]
    while borders[-1] < len(next_N):
        borders.append(next_N[borders[-1]])
    return borders


def reach(lengths_N: Ints, budget_N: Ints) -> list[int]:
    """Each segment ends as soon as it has 3/5 of the budget; what is behind the last border does not reach it."""
    ends_N = np.concatenate([[0], np.cumsum(lengths_N)])
    wanted_N = np.maximum(1, budget_N * 3 // 5)
    next_N = np.searchsorted(ends_N, ends_N[:-1] + wanted_N, side="left").tolist()
    borders = [0]
    while borders[-1] < len(next_N) and next_N[borders[-1]] <= len(next_N):
        borders.append(next_N[borders[-1]])
    return borders


def each_sentence(lengths_N: Ints, budget_N: Ints) -> list[int]:
    """Every sentence is a segment."""
    return list(range(len(lengths_N) + 1))


@dataclasses.dataclass(frozen=True)
class Segments:
    """The segments of a split's documents, in order."""

    tokens: Ints
    """[M, 2]: first token and the token after the last, in the store's ids"""
    documents: Ints
    """[D]: documents of the split"""
    counts: Ints
    """[D]: segments of each"""
    total: int
    """tokens of the split"""
    truncated: int
    """segments that are longer than their budget, and lost what lies beyond"""

    @property
    def document(self) -> Ints:
        """[M]: document of each segment."""
        return np.repeat(self.documents, self.counts)

    @property
    def kept(self) -> int:
        """Tokens in the segments."""
        return int((self.tokens[:, 1] - self.tokens[:, 0]).sum())


def cut_documents(store: Store, split: str, cut: Cut, budget: int, short: float = 0.0) -> Segments:
    """Cut every document of a split.

    Args:
        store: the corpus.
        split: train, validation or test.
        cut: one of the functions above.
        budget: tokens that a segment may have; what lies beyond is left out.
        short: share of segments with a smaller budget of their own.
    """
    documents_D = store.documents_of(split)
    counts_D = np.zeros(len(documents_D), dtype=np.int64)
    bounds_D2 = np.stack([store.document_offsets[documents_D], store.document_offsets[documents_D + 1]], axis=1)
    found: list[Ints] = []
    total = truncated = 0
    for d, (first, last) in enumerate(bounds_D2.tolist()):
        offsets_N = np.asarray(store.sentence_offsets[first : last + 1])
        budget_N = _budgets(offsets_N[:-1], budget, short)
        borders = np.asarray(cut(np.diff(offsets_N), budget_N))
        begin_M, end_M = offsets_N[borders[:-1]], offsets_N[borders[1:]]
        # A segment that was cut off whole sentences earlier keeps its sentences; only the budget itself cuts into one.
        limit_M = begin_M + (budget_N[borders[:-1]] if len(borders) > 1 else 0)
        found.append(np.stack([begin_M, np.minimum(end_M, limit_M)], axis=1))
        counts_D[d] = len(borders) - 1
        total += int(offsets_N[-1] - offsets_N[0])
        truncated += int((end_M > limit_M).sum())
    tokens_M2 = np.concatenate([*found, np.zeros((0, 2), dtype=np.int64)]).astype(np.int64)
    return Segments(tokens_M2, documents_D, counts_D, total, truncated)


def _budgets(begin_N: Ints, budget: int, short: float) -> Ints:
    """[N]: the budget of a segment that begins at each sentence, a function of where that stands in the corpus."""
    if short == 0:
        return np.full(len(begin_N), budget)
    coin_N, size_N = seeds.uniform(0, "short", (budget,), begin_N, 2).T
    return np.where(coin_N < short, 2 + np.floor(size_N * (budget - 1)).astype(np.int64), budget)
