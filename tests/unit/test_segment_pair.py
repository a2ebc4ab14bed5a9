"""SEGMENT-PAIR: where documents are cut, what is paired, how a sequence looks."""

from pathlib import Path

import numpy as np
import pytest
from datahelp import small_store

from clozelab.data.corpora.text import Text
from clozelab.data.formats.segment_pair import CUTS, SegmentPair
from clozelab.data.store import Store, open_store
from clozelab.data.tokenizers import WordPieceOption


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return small_store(tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("cut", sorted(CUTS))
@pytest.mark.parametrize("max_length", [8, 32, 64])
def test_table(store: Store, cut: str, max_length: int) -> None:
    form = SegmentPair(max_length, cut)
    made = form.examples(store, "train")
    assert (made.lengths >= 1).all()
    assert (made.lengths <= form.budget).all()
    a, b = made.first, made.first + 1
    # Neighbours of one document, each segment used at most once.
    assert np.array_equal(made.segment_document[a], made.segment_document[b])
    assert len(np.unique(np.concatenate([a, b]))) == 2 * made.n
    assert (store.splits[made.segment_document] == 0).all()
    # B begins where A's last sentence ends, and every segment at the start of a sentence.
    assert np.isin(made.segments[:, 0], store.sentence_offsets).all()
    following = np.searchsorted(store.sentence_offsets, made.segments[a, 1])
    assert np.array_equal(store.sentence_offsets[following], made.segments[b, 0])
    counts = made.counts
    assert counts["sequences"] == made.n
    assert counts["segments"] == len(made.segments) == 2 * made.n + counts["leftover_segments"]
    assert counts["tokens"] + counts["lost_tokens"] == store.counts["train"]["tokens"]
    assert counts["documents"] == store.counts["train"]["documents"]
    assert np.array_equal(made.content, store.document_hashes[made.segment_document[a]])


@pytest.mark.parametrize("max_length", [32, 64])
def test_sequences(store: Store, max_length: int) -> None:
    form = SegmentPair(max_length)
    made = form.examples(store, "validation")
    batch = form.assemble(store, made, *made.runs(np.arange(made.n)), made.n)
    tokenizer = store.tokenizer
    for row in range(made.n):
        (a0, a1), (b0, b1) = made.segments[made.first[row]], made.segments[made.first[row] + 1]
        a, b = store.ids[a0:a1].tolist(), store.ids[b0:b1].tolist()
        want = [tokenizer.cls_id, *a, tokenizer.sep_id, *b, tokenizer.sep_id]
        padding = max_length - len(want)
        assert batch["input_ids"][row].tolist() == want + [tokenizer.pad_id] * padding
        assert batch["segment_ids"][row].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * padding
        assert batch["attention_mask"][row].tolist() == [True] * len(want) + [False] * padding
        special = np.isin(batch["input_ids"][row], list(tokenizer.special_ids))
        assert batch["maskable"][row].tolist() == (~special).tolist()


def test_skipped_documents_and_no_examples(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Short text.", encoding="utf-8")
    (tmp_path / "b.txt").write_text("One is here. Two is here. Three is here. Four is here.", encoding="utf-8")
    corpus = Text(paths=[str(tmp_path / "?.txt")], validation=0)
    store = open_store(corpus, WordPieceOption(vocab_size=300), tmp_path / "cache")
    made = SegmentPair(max_length=14).examples(store, "train")
    assert made.counts["skipped_documents"] == 1
    assert made.n == 2
    with pytest.raises(ValueError, match=r"the train split of corpus text .* gives no segment pair"):
        SegmentPair(max_length=256).examples(store, "train")
    with pytest.raises(ValueError, match="the validation split of corpus"):
        SegmentPair(max_length=14).examples(store, "validation")
    with pytest.raises(ValueError, match="no split dev"):
        SegmentPair(max_length=14).examples(store, "dev")


def test_settings() -> None:
    with pytest.raises(ValueError, match=r"format\.max_length is 7"):
        SegmentPair(max_length=7)
    with pytest.raises(ValueError, match=r"format\.cut is page"):
        SegmentPair(cut="page")
