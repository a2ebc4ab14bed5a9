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

How it is done: a cut says of *every* sentence where a segment that began there would end, by one search over the
running token offsets; the segments are the chain of these answers from the first sentence on (`chain`). That goes by
blocks of sentences, so memory does not grow with the corpus but for the result. A block is whole documents where
segments stay within one; where rows go on across documents, the row that is open at a block's end begins the next one
(`rows_in_blocks`). So block sizes change no result.

Shapes: N sentences of a block, M segments, D documents of the split.
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from clozelab import seeds
from clozelab.data.store import Store

# Part of the key of examples on disk: raise it when anything beneath the formats' own files cuts differently.
CUT_VERSION = 1
BLOCK = 2**18  # sentences at a time (a document may have more): arrays of 2 MiB, near a processor's cache

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Span:
    """Successive sentences of a split."""

    begin: Ints
    """[N]: first token, in the store's ids; rising"""
    end: Ints
    """[N]: the token after the last; rising"""
    document: Ints
    """[N]: number of the document among those of the split, never falling"""
    opens: npt.NDArray[np.bool_]
    """[N]: whether it is its document's first sentence"""


class Sentences:
    """The sentences of a split, numbered from 0 in corpus order; other splits' documents may lie between them.

    Attributes:
        documents: [D] documents of the split, in the store.
        ends: [D] the number after each document's last sentence.
    """

    def __init__(self, store: Store, split: str) -> None:
        self.documents = store.documents_of(split)
        last_D = store.document_offsets[self.documents + 1]
        count_D = last_D - store.document_offsets[self.documents]
        self.ends: Ints = np.cumsum(count_D)
        self._begins = self.ends - count_D
        self._shift = last_D - self.ends  # from a number in the split to one in the store
        self._offsets = store.sentence_offsets

    @property
    def total(self) -> int:
        """Sentences of the split."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def span(self, first: int, last: int) -> Span:
        """Sentences `first` to `last` - 1 (at least one)."""
        d = int(np.searchsorted(self.ends, first, side="right"))
        e = int(np.searchsorted(self.ends, last, side="left")) + 1
        count_D = np.diff(np.minimum(self.ends[d:e], last), prepend=first)
        document_N = np.repeat(np.arange(d, e), count_D)
        sentence_N = np.arange(first, last) + np.repeat(self._shift[d:e], count_D)
        opens_N = np.zeros(last - first, dtype=bool)
        begins_D = self._begins[d:e] - first
        opens_N[begins_D[begins_D >= 0]] = True
        return Span(self._offsets[sentence_N], self._offsets[sentence_N + 1], document_N, opens_N)


# Of a block's sentences, the budget of a segment that begins at each, and where in the block the document of each ends:
# the sentence [N] before which that segment would end, never behind the document, and whether it is one at all [N].
Cut = Callable[[Span, Ints, Ints], tuple[Ints, npt.NDArray[np.bool_]]]


def greedy(span: Span, budget_N: Ints, stop_N: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Each segment ends before what does not fit; the last one with the document."""
    fitting_N = np.searchsorted(span.end, span.begin + budget_N, side="right")
    next_N = np.maximum(fitting_N, np.arange(1, len(fitting_N) + 1))
    return np.minimum(next_N, stop_N), np.ones(len(next_N), dtype=bool)


def reach(span: Span, budget_N: Ints, stop_N: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Each segment ends as soon as it has 3/5 of the budget; what does not reach it within the document is none."""
    wanted_N = np.maximum(1, budget_N * 3 // 5)
    next_N = np.searchsorted(span.end, span.begin + wanted_N, side="left") + 1
    return np.minimum(next_N, stop_N), next_N <= stop_N


def each_sentence(span: Span, budget_N: Ints, stop_N: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Every sentence is a segment."""
    return np.arange(1, len(stop_N) + 1), np.ones(len(stop_N), dtype=bool)


def chain(next_N: Ints) -> Ints:
    """Where one comes by from 0 on, going from each n to next_N[n] > n, before one leaves at N or beyond."""
    # One step a segment, not a sentence, over a list: pointer doubling would take log2(N) passes over whole arrays.
    step, size = next_N.tolist(), len(next_N)
    seen = bytearray(size)
    at = 0
    while at < size:
        seen[at] = 1
        at = step[at]
    return np.flatnonzero(np.frombuffer(seen, dtype=np.bool_))


def rows_in_blocks(total: int, next_of: Callable[[int, int], Ints]) -> Iterator[tuple[int, int, Ints]]:
    """Rows of successive things (sentences, segments), a block of things at a time.

    Args:
        total: things there are.
        next_of: of a block `first, last`: for each thing of it [last - first] where in the block the row that began
            there would end; at the block's end also if it would go on.

    Yields:
        (first, last, where rows begin, counted from `first`): whole rows, and everything once.
    """
    first, size = 0, BLOCK
    while first < total:
        last = min(first + size, total)
        begins = chain(next_of(first, last))
        if last < total:
            if len(begins) == 1:
                size *= 2  # one row has more than the block
                continue
            begins, last = begins[:-1], first + int(begins[-1])  # the open row goes to the next block
        yield first, last, begins
        first, size = last, BLOCK


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
    def document(self) -> npt.NDArray[np.integer]:
        """[M]: document of each segment."""
        return np.repeat(self.documents.astype(np.int32 if len(self.documents) < 2**31 else np.int64), self.counts)

    @property
    def kept(self) -> int:
        """Tokens in the segments."""
        return int(self.tokens[:, 1].sum() - self.tokens[:, 0].sum())


def cut_documents(store: Store, split: str, cut: Cut, budget: int, short: float = 0.0) -> Segments:
    """Cut every document of a split.

    Args:
        store: the corpus.
        split: train, validation or test.
        cut: one of the functions above.
        budget: tokens that a segment may have; what lies beyond is left out.
        short: share of segments with a smaller budget of their own.
    """
    sentences = Sentences(store, split)
    counts_D = np.zeros(len(sentences.documents), dtype=np.int64)
    found: list[Ints] = []
    first = total = truncated = 0
    while first < sentences.total:
        # As many whole documents as a block has room for, and one at least.
        d = int(np.searchsorted(sentences.ends, first, side="right"))
        e = max(d + 1, int(np.searchsorted(sentences.ends, first + BLOCK, side="right")))
        last = int(sentences.ends[e - 1])
        span = sentences.span(first, last)
        budget_N = _budgets(span.begin, budget, short)
        next_N, is_segment_N = cut(span, budget_N, sentences.ends[span.document] - first)
        at_M = chain(next_N)
        at_M = at_M[is_segment_N[at_M]]
        begin_M, end_M = span.begin[at_M], span.end[next_N[at_M] - 1]
        # A segment that was cut off whole sentences earlier keeps its sentences; only the budget itself cuts into one.
        limit_M = begin_M + budget_N[at_M]
        found.append(np.stack([begin_M, np.minimum(end_M, limit_M)], axis=1))
        counts_D[d:e] = np.bincount(span.document[at_M] - d, minlength=e - d)
        total += int((span.end - span.begin).sum())
        truncated += int((end_M > limit_M).sum())
        first = last
    return Segments(joined(found), sentences.documents, counts_D, total, truncated)


def joined(blocks: list[Ints]) -> Ints:
    """[M, 2]: tables of segments one after the other; the list is emptied, so that they are not held twice."""
    made = np.empty((sum(map(len, blocks)), 2), dtype=np.int64)
    end = len(made)
    while blocks:
        block = blocks.pop()
        made[end - len(block) : end] = block
        end -= len(block)
    return made


def _budgets(begin_N: Ints, budget: int, short: float) -> Ints:
    """[N]: the budget of a segment that begins at each sentence, a function of where that stands in the corpus."""
    if short == 0:
        return np.full(len(begin_N), budget)
    coin_N, size_N = seeds.uniform(0, "short", (budget,), begin_N, 2).T
    return np.where(coin_N < short, 2 + np.floor(size_N * (budget - 1)).astype(np.int64), budget)
