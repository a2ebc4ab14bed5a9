"""Contracts that every masking policy and every format keeps, those of tomorrow too: found by discovery."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from clozelab.data.corpora.text import Text
from clozelab.data.masking.cloze import ClozeMasking
from clozelab.data.store import Store, open_store
from clozelab.data.tokenizers import WordPieceOption
from clozelab.options import discover, registered

discover("clozelab.data")

SELECTIONS = sorted(registered("masking/selection"))
FORMATS = sorted(registered("format"))
COPIES = (None, 3)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("contract")
    rng = np.random.default_rng(0)
    words = ["river", "mountain", "senate", "tariff", "harvest", "railway", "treaty", "village"]
    for n in range(12):
        lines = [" ".join(rng.choice(words, int(rng.integers(2, 20)))).capitalize() + "." for _ in range(30)]
        # A text may contain what looks like a special token.
        (folder / f"{n}.txt").write_text(" ".join([*lines, "A [MASK] and a [SEP] here."]), encoding="utf-8")
    (folder / "phrases.list").write_text("senate tariff\nvillage railway treaty\n", encoding="utf-8")
    corpus = Text(paths=[str(folder / "*.txt")], validation=0)
    return open_store(corpus, WordPieceOption(vocab_size=300), folder / "cache")


def make(group: str, name: str, **settings: Any) -> Any:
    cls = registered(group)[name]
    known = {field.name for field in dataclasses.fields(cls)}
    return cls(**{key: value for key, value in settings.items() if key in known})


def sequences(store: Store, name: str) -> tuple[Any, Any, dict[str, np.ndarray]]:
    form = make("format", name, max_length=40)
    examples = form.examples(store, "train")
    return form, examples, form.assemble(store, examples, *examples.runs(np.arange(examples.n)), examples.n)


@pytest.mark.parametrize("name", FORMATS)
def test_format(store: Store, name: str) -> None:
    form, examples, batch = sequences(store, name)
    B, S = examples.n, form.max_length
    tokenizer = store.tokenizer
    apart = {"position_ids", "document_ids"} if form.style.apart else set()
    assert set(batch) == {"input_ids", "segment_ids", "attention_mask", "maskable"} | apart
    assert all(array.shape == (B, S) for array in batch.values())
    assert batch["input_ids"].dtype == batch["segment_ids"].dtype == np.int64
    assert batch["attention_mask"].dtype == batch["maskable"].dtype == np.bool_
    assert np.array_equal(batch["attention_mask"], batch["input_ids"] != tokenizer.pad_id)
    assert not batch["maskable"][np.isin(batch["input_ids"], list(tokenizer.special_ids))].any()
    assert not batch["maskable"][~batch["attention_mask"]].any()
    assert batch["maskable"].any(axis=1).all()
    assert set(np.unique(batch["segment_ids"])) <= {0, 1}
    _, _, again = sequences(store, name)
    assert all(np.array_equal(batch[key], again[key]) for key in batch)


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", SELECTIONS)
def test_masking(store: Store, name: str, form: str, copies: int | None) -> None:
    phrases = store.path.parents[1] / "phrases.list"
    masking = ClozeMasking(selection=make("masking/selection", name, path=str(phrases)), copies=copies)
    _, examples, batch = sequences(store, form)
    ids, maskable, tokenizer = batch["input_ids"], batch["maskable"], store.tokenizer
    indices = np.arange(examples.n)

    def mask(epoch: int, rows: Any = slice(None), seed: int = 0, **more: Any) -> tuple[np.ndarray, ...]:
        words = tokenizer.word_starts(ids[rows])
        key = {"seed": seed, "epoch": epoch, "example_ids": indices[rows], "starts_word_BS": words}
        return masking(ids[rows], maskable[rows], tokenizer, **key, **more)

    new, positions, targets = mask(0)
    K = masking.targets(ids.shape[1])
    assert new.dtype == positions.dtype == targets.dtype == np.int64
    assert new.shape == ids.shape
    assert positions.shape == targets.shape == (len(ids), K)
    used = targets != -100
    assert used.any(axis=1).all()
    assert (positions[~used] == 0).all()
    rows = np.broadcast_to(np.arange(len(ids))[:, None], used.shape)
    # Targets are text, name what stood there, and nothing else changes.
    assert maskable[rows[used], positions[used]].all()
    assert np.array_equal(targets[used], ids[rows[used], positions[used]])
    chosen = np.zeros(ids.shape, dtype=bool)
    chosen[rows[used], positions[used]] = True
    assert chosen.sum() == used.sum()
    assert np.array_equal(new[~chosen], ids[~chosen])
    assert not np.isin(new[chosen], list(tokenizer.special_ids - {tokenizer.mask_id})).any()

    # A pure function of seed, epoch or copy, and example; streams differ.
    part = slice(1, 4)
    assert all(
        np.array_equal(one, two[part]) for one, two in zip(mask(0, part), (new, positions, targets), strict=True)
    )
    assert not np.array_equal(mask(1)[0], new)
    assert not np.array_equal(mask(0, seed=1)[0], new)
    assert not np.array_equal(mask(0, stream="eval-mask")[0], new)
    if copies is not None:
        assert np.array_equal(mask(copies)[0], new)
