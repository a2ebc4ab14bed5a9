"""Examples on disk: the same as in memory, cut once, shared, and never half of them."""

import dataclasses
import errno
import logging
import multiprocessing
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from datahelp import small_store
from hypothesis import given
from hypothesis import strategies as st

from clozelab.data import example_cache
from clozelab.data.batches import Batch, Batches
from clozelab.data.example_cache import examples_key, examples_of
from clozelab.data.examples import ARRAYS, Examples, read_examples
from clozelab.data.format import FormatOption
from clozelab.data.formats.doc_sentences import DocSentences
from clozelab.data.formats.full_sentences import FullSentences
from clozelab.data.formats.packed import Packed
from clozelab.data.formats.segment_pair import SegmentPair
from clozelab.data.formats.sentence_pair import SentencePair
from clozelab.data.masking.cloze import ClozeMasking
from clozelab.data.pairs import pair_objective
from clozelab.data.store import Store

FORMATS: list[FormatOption] = [DocSentences(32), FullSentences(32), Packed(32), SegmentPair(32), SentencePair(32)]


@dataclasses.dataclass
class Noted(SegmentPair):
    """Writes a line into a file whenever it cuts."""

    notes: str = ""

    def examples(self, store: Store, split: str) -> Examples:
        with Path(self.notes).open("a", encoding="utf-8") as file:
            file.write("cut\n")
        return super().examples(store, split)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return small_store(tmp_path)


@pytest.fixture
def noted(tmp_path: Path) -> Noted:
    return Noted(32, notes=str(tmp_path / "notes"))


def cuts(form: Noted) -> int:
    return len(Path(form.notes).read_text(encoding="utf-8").splitlines())


def same(one: Examples, two: Examples) -> bool:
    """Whether they say the same, wherever they are."""
    rest = [[getattr(made, name) for name in ("counts", "split", "corpus", "paired")] for made in (one, two)]
    return rest[0] == rest[1] and all(np.array_equal(getattr(one, name), getattr(two, name)) for name in ARRAYS)


def left_in(store: Store) -> list[str]:
    return sorted(path.name for path in (store.path / "examples").iterdir() if path.suffix != ".lock")


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_what_is_on_disk_is_what_was_cut(store: Store, form: FormatOption) -> None:
    for split in ("train", "validation"):
        plain = form.examples(store, split)
        for made in (examples_of(store, form, split), examples_of(store, form, split)):
            assert made.path == store.path / "examples" / examples_key(form, split)
            assert same(made, plain)
            for name in ARRAYS:
                array = getattr(made, name)
                assert type(array) is np.ndarray
                assert array.dtype == getattr(plain, name).dtype
                assert not array.flags.writeable
    assert left_in(store) == sorted(examples_key(form, split) for split in ("train", "validation"))


def test_a_split_is_cut_once(store: Store, noted: Noted) -> None:
    for _ in range(3):
        examples_of(store, noted, "train")
    assert cuts(noted) == 1
    examples_of(store, noted, "validation")
    examples_of(store, dataclasses.replace(noted, max_length=40), "train")
    assert cuts(noted) == 3


def _open(asked: tuple[Store, Noted]) -> int:
    return int(examples_of(*asked, "train").segments.sum())


def test_two_processes_cut_once(store: Store, noted: Noted) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        got = pool.map(_open, [(store, noted)] * 2, chunksize=1)
    assert got == [int(noted.examples(store, "train").segments.sum())] * 2
    assert cuts(noted) == 2  # one of the two, and the one that they are held against


def test_what_tells_examples_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    first = examples_key(SegmentPair(32), "train")
    assert first == examples_key(SegmentPair(max_length=32), "train")
    others = [
        examples_key(SegmentPair(32), "validation"),
        examples_key(SegmentPair(33), "train"),
        examples_key(SegmentPair(32, cut="greedy"), "train"),
        examples_key(SegmentPair(32, short_seq_prob=0.1), "train"),
        examples_key(SentencePair(32), "train"),
        examples_key(Noted(32), "train"),
    ]
    monkeypatch.setattr(example_cache, "_source", lambda module: "edited")
    others.append(examples_key(SegmentPair(32), "train"))
    monkeypatch.undo()
    monkeypatch.setattr(example_cache, "CUT_VERSION", -1)
    others.append(examples_key(SegmentPair(32), "train"))
    assert len({first, *others}) == 1 + len(others)


@pytest.mark.parametrize("name", [*(f"{name}.bin" for name in ARRAYS), "meta.json"])
@pytest.mark.parametrize("harm", ["gone", "half", "more"])
def test_what_is_not_whole_is_cut_again(store: Store, name: str, harm: str) -> None:
    form = SegmentPair(32)
    file = store.path / "examples" / examples_key(form, "train") / name
    good = examples_of(store, form, "train")
    data = file.read_bytes()
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(data[: len(data) // 2] if harm == "half" else data + b"}")
    with pytest.raises(ValueError, match=r"the examples in .* cannot be read .*: delete that folder"):
        read_examples(file.parent)
    again = examples_of(store, form, "train")
    assert again.path is not None
    assert file.read_bytes() == data
    assert same(again, form.examples(store, "train"))
    assert good.n == again.n


def test_a_killed_writer_leaves_nothing_usable(store: Store) -> None:
    form = SegmentPair(32)
    beside = store.path / "examples" / f".{examples_key(form, 'train')}.999"
    beside.mkdir(parents=True)
    (beside / "segments.bin").write_bytes(b"half")
    assert same(examples_of(store, form, "train"), form.examples(store, "train"))
    assert left_in(store) == [examples_key(form, "train")]


def _no_room(made: Examples, folder: Path) -> None:
    (folder / "segments.bin").write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_no_matter(
    store: Store, noted: Noted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Examples, "write", _no_room)
        made = examples_of(store, noted, "train")
    assert made.path is None
    assert cuts(noted) == 1  # what was cut is used
    assert f"cannot keep examples in {store.path / 'examples'} (No space left on device)" in caplog.text
    assert left_in(store) == []
    later = examples_of(store, noted, "train")
    assert later.path is not None
    assert same(later, made)


def test_the_device_that_is_always_full(store: Store, tmp_path: Path) -> None:
    made = SegmentPair(32).examples(store, "train")
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "first.bin").symlink_to(full)
    with pytest.raises(OSError, match="No space left") as caught:
        made.write(tmp_path / "to")
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_read_only_store_is_no_matter(store: Store, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    known = examples_of(store, SegmentPair(32), "train")
    wanted = SegmentPair(40).examples(store, "train")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(example_cache.filelock, "FileLock", refuse)
    made = examples_of(store, SegmentPair(40), "train")
    assert made.path is None
    assert same(made, wanted)
    assert examples_of(store, SegmentPair(32), "train").path == known.path  # what is there needs no lock


def test_a_file_in_the_place_of_the_folder(store: Store) -> None:
    (store.path / "examples").write_text("x")
    assert examples_of(store, SegmentPair(32), "train").path is None


def test_other_faults_are_raised(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(made: Examples, folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Examples, "write", broken)
    with pytest.raises(OSError, match="Input/output error"):
        examples_of(store, SegmentPair(32), "train")
    assert left_in(store) == []


def test_a_split_without_an_example_is_named(store: Store) -> None:
    with pytest.raises(ValueError, match=r"the test split of corpus .* gives no segment pair"):
        examples_of(store, SegmentPair(32), "test")
    assert left_in(store) == []


def _batch(asked: tuple[Batches, int]) -> Batch:
    batches, step = asked
    return batches.batch(step)


def test_pickled_by_path(store: Store) -> None:
    form = SegmentPair(32)
    kept, cut = examples_of(store, form, "train"), form.examples(store, "train")
    for made in (kept, cut):
        assert made.lengths.sum() == made.counts["tokens"]  # derived arrays do not travel
        assert made.by_content.order.shape == (made.n,)
        assert same(pickle.loads(pickle.dumps(made)), cut)
        assert "lengths" not in vars(pickle.loads(pickle.dumps(made)))
    assert len(pickle.dumps(kept)) < 1000
    assert pickle.loads(pickle.dumps(kept)).path == kept.path
    want, got = (
        Batches(store, made, form, pair_objective("next"), ClozeMasking(), seed=0, batch_size=8) for made in (cut, kept)
    )
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        made = pool.map(_batch, [(got, 3)])[0]
    assert all(np.array_equal(made[key], array) for key, array in want.batch(3).items())


def test_pickles_of_a_cache_that_was_deleted(store: Store) -> None:
    made = examples_of(store, SegmentPair(32), "train")
    data = pickle.dumps(made)
    shutil.rmtree(store.path / "examples")
    with pytest.raises(ValueError, match=r"the examples in .* cannot be read"):
        pickle.loads(data)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_what_is_asked_for_a_batch_is_what_the_whole_says(
    store: Store, form: FormatOption, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clozelab.data.examples._BLOCK", 7)
    made = examples_of(store, form, "train")
    some = np.random.default_rng(0).permutation(made.n)[:20]
    whole = [sum(made.lengths[a : a + size].tolist()) for a, size in zip(made.first, made.sizes, strict=True)]
    assert made.text_tokens.tolist() == whole
    assert np.array_equal(made.lengths_of(made.first[some]), made.lengths[made.first[some]])
    assert len(made.lengths_of(some[:0])) == 0
    assert made.mean(form.style.lengths) == form.lengths(made).mean()


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40))
def test_pools_of_equal_documents(hashes: list[int]) -> None:
    content = np.asarray(hashes, dtype=np.uint64)
    n = len(hashes)
    made = Examples(
        segments=np.zeros((2 * n, 2), dtype=np.int64),
        segment_document=np.zeros(2 * n, dtype=np.int32),
        first=2 * np.arange(n),
        sizes=np.full(n, 2),
        content=content,
        counts={},
        split="train",
        corpus="made up",
        paired=True,
    )
    pool = made.by_content
    assert pool.order.tolist() == np.argsort(content, kind="stable").tolist()
    assert pool.size.tolist() == [hashes.count(h) for h in hashes]
    assert pool.first.tolist() == [sum(other < h for other in hashes) for h in hashes]
