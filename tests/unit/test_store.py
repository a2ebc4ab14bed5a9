"""The store: what is in it, that it is built once, and what happens without room."""

import multiprocessing
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from datahelp import small_corpus, small_store

from clozelab.data import pieces
from clozelab.data import store as store_module
from clozelab.data.corpora.sotu import Sotu
from clozelab.data.corpora.text import Text
from clozelab.data.corpus import SPLITS, sentences
from clozelab.data.store import cache_dir, data_fingerprint, open_store
from clozelab.data.tokenizers import WordPieceOption

TOKENIZER = WordPieceOption(vocab_size=400)


def test_it_holds_the_corpus(tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path / "text")
    store = open_store(corpus, TOKENIZER, tmp_path / "cache")
    n = 0
    for d, document in enumerate(corpus.read()):
        assert SPLITS[store.splits[d]] == document.split
        assert store.document_hashes[d] == document.content
        assert store.document_offsets[d] == n
        found = sentences(document.text, "en")
        for ids in store.tokenizer.encode_batch(found):
            assert np.array_equal(store.sentence(n), ids)
            n += 1
    assert store.document_offsets[-1] == n == len(store.sentence_offsets) - 1
    assert store.sentence_offsets[-1] == len(store.ids)
    assert store.ids.dtype == np.uint16
    assert sum(c["tokens"] for c in store.counts.values()) == len(store.ids)
    assert sum(c["documents"] for c in store.counts.values()) == 30
    assert not store.ids.flags.writeable


def test_second_open_is_a_hit_and_changes_miss(tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path / "text")
    first = open_store(corpus, TOKENIZER, tmp_path / "cache")
    second = open_store(corpus, TOKENIZER, tmp_path / "cache")
    assert not first.hit
    assert second.hit
    assert first.path == second.path == tmp_path / "cache" / data_fingerprint(corpus, TOKENIZER)
    assert not open_store(corpus, WordPieceOption(vocab_size=410), tmp_path / "cache").hit
    (tmp_path / "text" / "000.txt").write_text("Other words stand here. And here.", encoding="utf-8")
    assert not open_store(corpus, TOKENIZER, tmp_path / "cache").hit


def test_batches_of_sentences_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = small_corpus(tmp_path / "text")
    one = open_store(corpus, TOKENIZER, tmp_path / "1")
    monkeypatch.setattr(pieces, "BATCH", 7)
    two = open_store(corpus, TOKENIZER, tmp_path / "2")
    for file in one.path.iterdir():
        assert file.read_bytes() == (two.path / file.name).read_bytes(), file.name


def test_a_sentence_without_tokens_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One thing.\n\n\x07\x07\n\nAnother thing.", encoding="utf-8")
    (tmp_path / "b.txt").write_text("\x07", encoding="utf-8")
    store = open_store(Text(paths=[str(tmp_path / "?.txt")], validation=0), TOKENIZER, tmp_path / "cache")
    assert store.counts["train"]["documents"] == 1
    assert np.diff(store.sentence_offsets).min() > 0
    assert store.counts["train"]["sentences"] == 2


def _open(folder: Path) -> tuple[str, bool, int]:
    corpus = Text(paths=[str(folder / "text" / "*.txt")], validation=0.2)
    store = open_store(corpus, TOKENIZER, folder / "cache")
    return str(store.path), store.hit, int(np.asarray(store.ids, dtype=np.int64).sum())


def test_two_processes_build_one_store(tmp_path: Path) -> None:
    small_corpus(tmp_path / "text")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        got = pool.map(_open, [tmp_path] * 2, chunksize=1)
    assert got[0][0] == got[1][0]
    assert got[0][2] == got[1][2]
    assert sorted(hit for _, hit, _ in got) == [False, True]
    left = {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()}
    assert left == {"tokenizers", Path(got[0][0]).name}


def test_a_killed_build_leaves_nothing_usable(tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path / "text")
    cache = tmp_path / "cache"
    fingerprint = data_fingerprint(corpus, TOKENIZER)
    for name in (f".{fingerprint}.999", f".{fingerprint}.unfinished"):
        (cache / name).mkdir(parents=True)
        (cache / name / "ids.bin").write_bytes(b"half")
    store = open_store(corpus, TOKENIZER, cache)
    assert not store.hit
    assert not list(cache.glob(f".{fingerprint}.*"))
    whole = open_store(corpus, TOKENIZER, tmp_path / "whole")
    assert np.array_equal(store.ids, whole.ids)


def test_a_failed_build_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = small_corpus(tmp_path / "text")
    cache = tmp_path / "cache"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "build", full)
        with pytest.raises(ValueError, match=f"no room in the cache folder {cache}"):
            open_store(corpus, TOKENIZER, cache)
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]
    assert not open_store(corpus, TOKENIZER, cache).hit


def test_no_room_or_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = small_corpus(tmp_path / "text")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"cannot write to the cache folder .*file"):
        open_store(corpus, TOKENIZER, tmp_path / "file")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ValueError, match="no room in the cache folder"):
        open_store(corpus, TOKENIZER, tmp_path / "cache")


def test_pickled_by_path(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    data = pickle.dumps(store)
    assert len(data) < 1000
    assert np.array_equal(pickle.loads(data).ids, store.ids)


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLOZELAB_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("CLOZELAB_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "clozelab"


def test_fingerprint_of_the_packaged_text_is_quick() -> None:
    import time

    data_fingerprint(Sotu(), WordPieceOption())
    start = time.perf_counter()
    data_fingerprint(Sotu(), WordPieceOption())
    assert time.perf_counter() - start < 0.3
