"""Every format against the plain way of making it: which sentences stand in which row, and what a row looks like."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datahelp import small_store

from clozelab.data.examples import Examples
from clozelab.data.format import FormatOption
from clozelab.data.formats.doc_sentences import DocSentences
from clozelab.data.formats.full_sentences import FullSentences
from clozelab.data.formats.packed import Packed
from clozelab.data.formats.segment_pair import SegmentPair
from clozelab.data.formats.sentence_pair import SentencePair
from clozelab.data.store import Store

FORMATS: list[FormatOption] = [
    DocSentences(32),
    FullSentences(32),
    Packed(32),
    SegmentPair(32),
    SegmentPair(32, short_seq_prob=0.5),
    SentencePair(32),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return small_store(tmp_path_factory.mktemp("store"))


def rows(store: Store, form: FormatOption) -> tuple[Examples, dict[str, Any]]:
    made = form.examples(store, "train")
    return made, form.assemble(store, made, *made.runs(np.arange(made.n)), made.n, sources=True)


def sentences_of(store: Store, document: int) -> list[list[int]]:
    return [store.sentence(n).tolist() for n in range(*store.document_offsets[document : document + 2])]


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_what_a_row_looks_like(store: Store, form: FormatOption) -> None:
    made, batch = rows(store, form)
    tokenizer = store.tokenizer
    ids, mask, source = batch["input_ids"], batch["attention_mask"], batch["source"]
    assert ids.shape == (made.n, form.max_length)
    assert np.array_equal(mask, ids != tokenizer.pad_id)
    assert np.array_equal(mask.sum(axis=1), form.lengths(made))
    # Padding stands at the end alone; a row begins with [CLS] and its text ends with [SEP].
    assert (np.diff(mask.astype(int), axis=1) <= 0).all()
    assert (ids[:, 0] == tokenizer.cls_id).all()
    assert (ids[np.arange(made.n), mask.sum(axis=1) - 1] == tokenizer.sep_id).all()
    text = source >= 0
    assert np.array_equal(ids[text], store.ids[source[text]])
    assert np.array_equal(text, batch["maskable"])  # this text holds no special token
    assert (mask & ~text).sum() == (form.style.lengths(made.sizes, made.text_tokens) - made.text_tokens).sum()
    if form.style.segments:
        second = batch["segment_ids"] == 1
        # From the token behind the first [SEP] to the second [SEP].
        first_sep = (ids == tokenizer.sep_id).argmax(axis=1)
        assert np.array_equal(second, (np.arange(form.max_length) > first_sep[:, None]) & mask)
    else:
        assert not batch["segment_ids"].any()


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_segment_is_a_run_of_whole_sentences_of_one_document(store: Store, form: FormatOption) -> None:
    made = form.examples(store, "train")
    assert (made.lengths >= 1).all()
    assert np.isin(made.segments[:, 0], store.sentence_offsets).all()
    begins = store.sentence_offsets[store.document_offsets[made.segment_document]]
    ends = store.sentence_offsets[store.document_offsets[made.segment_document + 1]]
    assert (made.segments[:, 0] >= begins).all()
    assert (made.segments[:, 1] <= ends).all()
    assert (store.splits[made.segment_document] == 0).all()
    # No token is in two segments, and what is in none is counted.
    assert (made.segments[1:, 0] >= made.segments[:-1, 1]).all()
    assert made.counts["tokens"] == made.lengths.sum()
    assert made.counts["tokens"] + made.counts["lost_tokens"] == store.counts["train"]["tokens"]
    cut = ~np.isin(made.segments[:, 1], store.sentence_offsets)
    assert cut.sum() <= made.counts["truncated_sentences"]


def test_doc_sentences_fill_up_within_a_document(store: Store) -> None:
    form = DocSentences(32)
    made = form.examples(store, "train")
    expected = []
    for document in store.documents_of("train"):
        row: list[int] = []
        for sentence in sentences_of(store, document):
            if row and len(row) + len(sentence) > 30:
                expected.append(row)
                row = []
            row = row + sentence[:30]
        expected.append(row)
    assert [store.ids[a:b].tolist() for a, b in made.segments] == expected


def test_full_sentences_go_on_across_documents(store: Store) -> None:
    form = FullSentences(32)
    _, batch = rows(store, form)
    tokenizer = store.tokenizer
    expected: list[list[int]] = []
    row: list[int] = []
    for document in store.documents_of("train"):
        for number, sentence in enumerate(sentences_of(store, document)):
            border = [tokenizer.sep_id] if number == 0 and row else []
            if row and len(row) + len(border) + len(sentence[:30]) > 30:
                expected.append(row)
                row, border = [], []
            row = row + border + sentence[:30]
    expected.append(row)
    got = [ids[mask].tolist()[1:-1] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    assert got == expected


def test_packed_pieces_stand_apart(store: Store) -> None:
    form = Packed(32)
    made, batch = rows(store, form)
    tokenizer = store.tokenizer
    position, document, mask = batch["position_ids"], batch["document_ids"], batch["attention_mask"]
    assert np.array_equal(position == 0, (batch["input_ids"] == tokenizer.cls_id) | ~mask)
    assert np.array_equal(document > 0, mask)
    for n in range(made.n):
        pieces = range(made.first[n], made.first[n] + made.sizes[n])
        numbers = [number for number in dict.fromkeys(document[n].tolist()) if number]
        assert len(numbers) == len(pieces)
        for number, piece in zip(numbers, pieces, strict=True):
            here = document[n] == number
            a, b = made.segments[piece]
            assert batch["input_ids"][n][here].tolist() == [tokenizer.cls_id, *store.ids[a:b], tokenizer.sep_id]
            assert position[n][here].tolist() == list(range(b - a + 2))
        if n + 1 < made.n:  # the next piece would not have fitted
            assert mask[n].sum() + made.lengths[made.first[n + 1]] + 2 > 32


def test_short_segments_are_as_many_as_asked_for_and_their_neighbours_know_nothing(store: Store) -> None:
    form = SegmentPair(64, cut="greedy", short_seq_prob=0.5)
    lengths = form.examples(store, "train").lengths
    always = SegmentPair(64, cut="greedy").examples(store, "train").lengths
    assert lengths.mean() < 0.85 * always.mean()
    assert np.array_equal(form.examples(store, "train").segments, form.examples(store, "train").segments)
    for bad in (-0.1, 1.1):
        with pytest.raises(ValueError, match=r"format\.short_seq_prob is"):
            SegmentPair(64, short_seq_prob=bad)


def test_a_split_without_an_example_is_named(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the test split of corpus .* gives no sequence"):
        DocSentences(32).examples(store, "test")
    with pytest.raises(ValueError, match=r"format\.max_length is 4"):
        Packed(4)
