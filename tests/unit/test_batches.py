"""Batches: a pure function of the step, whoever asks and with however many workers and ranks."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datahelp import small_store

from clozelab.data.batches import Batch, Batches, fixed_batches
from clozelab.data.formats.segment_pair import SegmentPair
from clozelab.data.loading import ClozeData
from clozelab.data.masking.cloze import ClozeMasking
from clozelab.data.pairs import pair_objective
from clozelab.data.store import Store

FORMAT = SegmentPair(max_length=48)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return small_store(tmp_path_factory.mktemp("store"))


def batches(store: Store, size: int = 16, pair: str = "next", seed: int = 0) -> Batches:
    return Batches(store, FORMAT.examples(store, "train"), FORMAT, pair_objective(pair), ClozeMasking(), seed, size)


def same(one: Batch, two: Batch) -> bool:
    return one.keys() == two.keys() and all(np.array_equal(one[key], two[key]) for key in one)


def test_contract(store: Store) -> None:
    K = ClozeMasking().targets(48)
    batch = batches(store).batch(0)
    want = {
        "input_ids": ((16, 48), np.int64), "segment_ids": ((16, 48), np.int64), "attention_mask": ((16, 48), np.bool_),
        "target_positions": ((16, K), np.int64), "target_ids": ((16, K), np.int64),
        "pair_labels": ((16,), np.int64), "example_ids": ((16,), np.int64),
    }  # fmt: skip
    assert {key: (array.shape, array.dtype.type) for key, array in batch.items()} == want


def test_pure_in_the_step(store: Store) -> None:
    forward = batches(store)
    taken = [forward.batch(step) for step in range(12)]
    for step in (7, 0, 11, 3):
        assert same(batches(store).batch(step), taken[step])
    assert not same(batches(store, seed=1).batch(0), taken[0])


def test_every_epoch_has_every_example_once_and_batches_run_over(store: Store) -> None:
    made = batches(store, size=17)
    n = made.examples.n
    assert n % 17
    ids = np.concatenate([made.batch(step)["example_ids"] for step in range(3 * n // 17 + 1)])
    epochs = ids[: 3 * n].reshape(3, n)
    assert (np.sort(epochs, axis=1) == np.arange(n)).all()
    assert not np.array_equal(epochs[0], epochs[1])
    assert all(len(made.batch(step)["example_ids"]) == 17 for step in range(40))


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_rows_do_not_depend_on_the_batch_size(store: Store, size: int) -> None:
    one, other = batches(store, 8), batches(store, size)
    total = 40
    rows_one = [same_row for step in range(total // 8) for same_row in _rows(one.batch(step))]
    rows_other = [row for step in range(-(-total // size)) for row in _rows(other.batch(step))][:total]
    assert all(same(a, b) for a, b in zip(rows_one, rows_other, strict=True))


def _rows(batch: Batch) -> list[Batch]:
    return [{key: array[row] for key, array in batch.items()} for row in range(len(batch["example_ids"]))]


def test_ranks_part_the_rows(store: Store) -> None:
    made = batches(store)
    for step in (0, made.examples.n // 16):
        whole = made.batch(step)
        for rank in range(4):
            part = made.batch(step, rank, 4)
            assert same(part, {key: array[rank::4] for key, array in whole.items()})


def test_nonpad_tokens(store: Store) -> None:
    for pair in ("none", "next", "order"):
        made = batches(store, pair=pair)
        for step in (0, 5, made.examples.n // 16):
            assert made.nonpad_tokens(step) == made.batch(step)["attention_mask"].sum()


def test_workers_change_nothing(store: Store) -> None:
    made = batches(store)
    want = [made.batch(step) for step in range(3, 9)]
    for workers in (0, 1, 2):
        for _ in range(2):  # a second pass over the same loader, too
            loader = ClozeData(made, total_steps=9, start_step=3, workers=workers).train_dataloader()
            got = list(loader)
            assert len(got) == 6
            for one, two in zip(got, want, strict=True):
                assert all(isinstance(value, torch.Tensor) for value in one.values())
                assert same({key: value.numpy() for key, value in one.items()}, two)


def test_loader_for_ranks(store: Store) -> None:
    data = ClozeData(batches(store), total_steps=2)
    got = list(data.train_dataloader(start_step=1, total_steps=4, rank=1, world=2))
    assert [len(batch["example_ids"]) for batch in got] == [8, 8, 8]
    with pytest.raises(ValueError, match="3 ranks cannot part a batch of 16"):
        data.train_dataloader(rank=0, world=3)


def test_fixed_batches(store: Store) -> None:
    examples = FORMAT.examples(store, "validation")

    def view(size: int, pair: str = "next", limit: int | None = None) -> list[Batch]:
        found = fixed_batches(store, examples, FORMAT, pair_objective(pair), ClozeMasking(), 3, size, limit)
        return [row for batch in found for row in _rows(batch)]

    one = view(7)
    assert [int(row["example_ids"]) for row in one] == list(range(examples.n))
    assert all(same(a, b) for a, b in zip(one, view(16), strict=True))
    # The masked positions are those of the training stream for nobody, and the same ones where segments are the same.
    train = Batches(store, examples, FORMAT, pair_objective("none"), ClozeMasking(), 3, examples.n).batch(0)
    none = view(7, "none")
    order = np.argsort(train["example_ids"])
    assert any(
        not np.array_equal(row["target_positions"], train["target_positions"][order[n]]) for n, row in enumerate(none)
    )
    few = view(7, limit=10)
    assert len(few) == 10
    assert all(same(row, one[int(row["example_ids"])]) for row in few)


def test_refuses_what_cannot_be(store: Store) -> None:
    with pytest.raises(ValueError, match="batch size is 0"):
        batches(store, size=0)


def test_no_torch_outside_of_loading() -> None:
    source = Path(__file__).parents[2] / "src" / "clozelab" / "data"
    modules = [
        ".".join(("clozelab", "data", *path.relative_to(source).with_suffix("").parts))
        for path in source.rglob("*.py")
        if path.name not in ("loading.py", "__init__.py")
    ]
    code = f"import sys, importlib; [importlib.import_module(m) for m in {modules}]; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
