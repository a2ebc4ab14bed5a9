"""Cutting by blocks of whole arrays against the plain way: document by document, segment by segment."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clozelab import seeds
from clozelab.data import cutting
from clozelab.data.cutting import Cut, Span, chain, cut_documents, greedy, reach, rows_in_blocks
from clozelab.data.examples import ARRAYS, Examples
from clozelab.data.format import FormatOption
from clozelab.data.formats.doc_sentences import DocSentences
from clozelab.data.formats.full_sentences import FullSentences
from clozelab.data.formats.packed import Packed
from clozelab.data.formats.segment_pair import SegmentPair
from clozelab.data.formats.sentence_pair import SentencePair
from clozelab.data.store import Store

Documents = list[tuple[int, list[int]]]  # of each its split, and the lengths of its sentences


def store_of(documents: Documents) -> Store:
    """A store that knows where sentences begin, and holds no text."""
    lengths = [length for _, sentences in documents for length in sentences]
    return Store(
        path=Path("nowhere"),
        ids=np.zeros(0, dtype=np.uint16),
        sentence_offsets=np.cumsum([0, *lengths]),
        document_offsets=np.cumsum([0, *(len(sentences) for _, sentences in documents)]),
        splits=np.asarray([split for split, _ in documents], dtype=np.uint8),
        document_hashes=np.arange(100, 100 + len(documents), dtype=np.uint64),
        words=None,
        tokenizer=None,  # type: ignore[arg-type]
        counts={},
        corpus="made up",
        fingerprint="none",
    )


# --- the plain way ----------------------------------------------------------------------------------------------------


def plain_borders(form: FormatOption, lengths: list[int], budgets: list[int]) -> list[int]:
    """Where a document is cut, in sentences."""
    if isinstance(form, SentencePair):
        return list(range(len(lengths) + 1))
    borders, have = [0], 0
    reaching = isinstance(form, SegmentPair) and form.cut == "reach"
    for n, length in enumerate(lengths):
        budget = budgets[borders[-1]]
        if not reaching and n > borders[-1] and have + length > budget:
            borders.append(n)
            have = 0
        have += length
        if reaching and have >= max(1, budget * 3 // 5):
            borders.append(n + 1)
            have = 0
    return borders if reaching or not lengths else [*borders, len(lengths)]


def plain_budget(begin: int, budget: int, short: float) -> int:
    coin, size = seeds.uniform(0, "short", (budget,), np.asarray([begin]), 2)[0].tolist()
    return 2 + int(size * (budget - 1)) if coin < short else budget


def plain(form: FormatOption, store: Store, split: str) -> dict[str, Any]:
    """Arrays and counts of the examples; full_sentences goes its own way, on across documents."""
    paired = isinstance(form, SegmentPair | SentencePair)
    budget = (form.max_length - 3) // 2 if paired else form.max_length - 2
    short = form.short_seq_prob if isinstance(form, SegmentPair) else 0.0
    segments: list[tuple[int, int]] = []
    owner: list[int] = []
    first, sizes = [], []
    room = total = truncated = skipped = 0
    for d in store.documents_of(split).tolist():
        offsets = store.sentence_offsets[store.document_offsets[d] : store.document_offsets[d + 1] + 1].tolist()
        total += offsets[-1] - offsets[0]
        before = len(segments)
        if isinstance(form, FullSentences):
            for n, (begin, end) in enumerate(itertools.pairwise(offsets)):
                length = min(end - begin, budget)
                truncated += end - begin > budget
                if not sizes or length + (n == 0) > room:
                    first.append(len(segments))
                    sizes.append(0)
                    room = budget + (n == 0)
                if n == 0 or sizes[-1] == 0:
                    segments.append((begin, begin))
                    owner.append(d)
                    sizes[-1] += 1
                segments[-1] = (segments[-1][0], begin + length)
                room -= length + (n == 0)
            skipped += len(offsets) == 1
            continue
        budgets = [plain_budget(begin, budget, short) for begin in offsets[:-1]]
        for a, b in itertools.pairwise(plain_borders(form, np.diff(offsets).tolist(), budgets)):
            truncated += offsets[b] - offsets[a] > budgets[a]
            segments.append((offsets[a], min(offsets[b], offsets[a] + budgets[a])))
            owner.append(d)
        skipped += len(segments) - before < 1 + paired
        if paired:
            found = range(before, len(segments) - 1, 2)
            first += found
            sizes += [2] * len(found)
    if isinstance(form, DocSentences):
        first, sizes = list(range(len(segments))), [1] * len(segments)
    if isinstance(form, Packed):
        for number, (begin, end) in enumerate(segments):
            if not sizes or end - begin + 2 > room:
                first.append(number)
                sizes.append(0)
                room = form.max_length
            sizes[-1] += 1
            room -= end - begin + 2
    kept = sum(end - begin for begin, end in segments)
    return {
        "segments": segments,
        "segment_document": owner,
        "first": first,
        "sizes": sizes,
        "content": [int(store.document_hashes[owner[n]]) for n in first],
        "counts": {
            "documents": len(store.documents_of(split)),
            "skipped_documents": skipped,
            "segments": len(segments),
            "leftover_segments": len(segments) - 2 * len(first) if paired else 0,
            "truncated_sentences": truncated,
            "lost_tokens": total - kept,
            "tokens": kept,
            "sequences": len(first),
        },
    }


def as_lists(made: Examples) -> dict[str, Any]:
    arrays = {name: getattr(made, name).tolist() for name in ARRAYS}
    arrays["segments"] = [tuple(segment) for segment in arrays["segments"]]
    return {**arrays, "counts": made.counts}


# --- against it -------------------------------------------------------------------------------------------------------

FORMATS: list[FormatOption] = [
    DocSentences(),
    FullSentences(),
    Packed(),
    SegmentPair(),
    SegmentPair(cut="greedy"),
    SegmentPair(short_seq_prob=0.5),
    SegmentPair(cut="greedy", short_seq_prob=0.9),
    SentencePair(),
]
LENGTHS = st.one_of(st.integers(1, 8), st.integers(1, 40))
DOCUMENTS = st.lists(st.tuples(st.sampled_from([0, 0, 0, 1]), st.lists(LENGTHS, max_size=20)), max_size=15)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@settings(max_examples=150, deadline=None)
@given(documents=DOCUMENTS, max_length=st.integers(8, 70), block=st.one_of(st.integers(1, 30), st.just(2**18)))
def test_blocks_give_what_the_plain_way_gives(
    form: FormatOption, documents: Documents, max_length: int, block: int
) -> None:
    form = type(form)(**{**vars(form), "max_length": max_length})
    store = store_of(documents)
    want = plain(form, store, "train")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "BLOCK", block)
        if not want["first"]:
            with pytest.raises(ValueError, match="the train split of corpus made up gives no"):
                form.examples(store, "train")
        else:
            assert as_lists(form.examples(store, "train")) == want


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_many_documents(form: FormatOption, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks, documents of one sentence to several blocks, other splits' documents between them."""
    monkeypatch.setattr(cutting, "BLOCK", 1000)
    generator = np.random.default_rng(3)
    counts = [*generator.integers(1, 200, size=150).tolist(), 3500, 1, 1, *generator.integers(1, 20, size=200).tolist()]
    documents = [(int(generator.random() < 0.2), generator.integers(1, 80, size=n).tolist()) for n in counts]
    store = store_of(documents)
    assert as_lists(form.examples(store, "train")) == plain(form, store, "train")


def test_documents_are_whole_numbers_of_half_the_size() -> None:
    made = DocSentences(32).examples(store_of([(0, [4, 5]), (0, [6])]), "train")
    assert made.segment_document.dtype == np.int32
    assert {made.segments.dtype, made.first.dtype, made.sizes.dtype} == {np.dtype(np.int64)}


# --- what each cut promises -------------------------------------------------------------------------------------------


def borders(cut: Cut, lengths: list[int], budgets: list[int]) -> list[int]:
    """Where one document is cut, in sentences from 0."""
    N = len(lengths)
    end_N = np.cumsum(np.asarray(lengths, dtype=np.int64))
    span = Span(end_N - lengths, end_N, np.zeros(N, dtype=np.int64), np.arange(N) == 0)
    next_N, is_segment_N = cut(span, np.asarray(budgets, dtype=np.int64), np.full(N, N))
    at_M = chain(next_N)
    assert is_segment_N[at_M[:-1]].all()  # only what is left at the end may be none
    return [0, *next_N[at_M[is_segment_N[at_M]]].tolist()]


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(2, 40)), max_size=50))
def test_greedy_fills_as_far_as_it_can(sentences: list[tuple[int, int]]) -> None:
    lengths, budgets = [length for length, _ in sentences], [budget for _, budget in sentences]
    found = borders(greedy, lengths, budgets)
    assert found[-1] == len(lengths)
    for first, last in itertools.pairwise(found):
        assert last == first + 1 or sum(lengths[first:last]) <= budgets[first]
        if last < len(lengths):
            assert sum(lengths[first : last + 1]) > budgets[first]


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(2, 40)), max_size=50))
def test_reach_ends_with_the_sentence_that_reaches(sentences: list[tuple[int, int]]) -> None:
    lengths, budgets = [length for length, _ in sentences], [budget for _, budget in sentences]
    found = borders(reach, lengths, budgets)
    for first, last in itertools.pairwise(found):
        assert sum(lengths[first:last]) >= max(1, budgets[first] * 3 // 5) > sum(lengths[first : last - 1])
    if found[-1] < len(lengths):
        assert sum(lengths[found[-1] :]) < budgets[found[-1]] * 3 // 5


def test_a_short_budget_belongs_to_the_place_in_the_corpus() -> None:
    documents: Documents = [(0, [9] * 50), (1, [7] * 50), (0, [8] * 50)]
    store = store_of(documents)
    train = cut_documents(store, "train", greedy, 30, short=0.5)
    alone = cut_documents(store_of([(1, [9] * 50), (1, [7] * 50), (0, [8] * 50)]), "train", greedy, 30, short=0.5)
    assert np.array_equal(train.tokens[train.document == 2], alone.tokens)
    assert len(np.unique(alone.tokens[:, 1] - alone.tokens[:, 0])) > 2


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.integers(1, 70))
def test_rows_are_whole_whatever_the_block(steps: list[int], block: int) -> None:
    next_N = np.arange(len(steps)) + steps

    def next_of(first: int, last: int) -> npt.NDArray[np.int64]:
        return np.minimum(next_N[first:last], last) - first

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "BLOCK", block)
        found = list(rows_in_blocks(len(steps), next_of))
    assert [first for first, _, _ in found] == [0, *(last for _, last, _ in found)][:-1]
    assert found[-1][1] == len(steps)
    assert [first + begin for first, _, begins in found for begin in begins.tolist()] == chain(next_N).tolist()
