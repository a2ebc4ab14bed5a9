"""Memory stays flat: nothing that is made for a batch, an epoch or an order is kept (pitfall F73)."""

import gc
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from datahelp import small_store

from clozelab.data.batches import Batches
from clozelab.data.format import FormatOption
from clozelab.data.formats.doc_sentences import DocSentences
from clozelab.data.formats.packed import Packed
from clozelab.data.formats.sentence_pair import SentencePair
from clozelab.data.loading import ClozeData
from clozelab.data.masking.causal import CausalTargets
from clozelab.data.masking.cloze import ClozeMasking
from clozelab.data.masking.selections.span import SpanSelection
from clozelab.data.pairs import pair_objective
from clozelab.data.phases import Phases
from clozelab.data.store import Store

KIB, MIB = 2**10, 2**20
ROWS = 16


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return small_store(tmp_path_factory.mktemp("store"), documents=150, sentences=60)


def batches(store: Store, form: FormatOption, masking: Any, pair: str = "none") -> Batches:
    return Batches(store, form.examples(store, "train"), form, pair_objective(pair), masking, 0, ROWS)


CASES: dict[str, Callable[[Store], Batches]] = {
    "pairs": lambda store: batches(store, SentencePair(64), ClozeMasking(), "next"),
    "packed spans": lambda store: batches(store, Packed(64), ClozeMasking(selection=SpanSelection(), together=True)),
    "a rate by step": lambda store: batches(
        store, DocSentences(64), ClozeMasking(rate_law="linear", rate_to=0.4, rate_steps=100)
    ),
    "causal": lambda store: batches(store, Packed(64), CausalTargets()),
}


def steps_of(made: Batches, epoch: int) -> range:
    """The steps of an epoch."""
    n = made.examples.n
    return range(-(-epoch * n // ROWS), -(-(epoch + 1) * n // ROWS))


def traced(warm: Callable[[], None], work: Callable[[], None]) -> tuple[int, int]:
    """(bytes that Python and NumPy hold more after the work than before, most that they held more during it).

    What is made once and then kept or replaced is made by `warm`, before the work.
    """
    tracemalloc.start()
    try:
        warm()
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        work()
        gc.collect()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return after - before, peak - before


def read(made: Batches | Phases, steps: Iterable[int]) -> None:
    for step in steps:
        made.batch(step)


@pytest.mark.parametrize("case", CASES)
def test_three_epochs_keep_nothing(store: Store, case: str) -> None:
    made = CASES[case](store)
    size = sum(array.nbytes for array in made.batch(0).values())
    assert len(steps_of(made, 0)) * size > MIB  # so a kept epoch would show
    later = range(steps_of(made, 1).start, steps_of(made, 3).stop)
    kept, peak = traced(lambda: read(made, steps_of(made, 0)), lambda: read(made, later))
    # Blocks of the order of three more epochs, and a few objects; while batches are made, those made together.
    assert kept < 128 * KIB
    assert peak < 4 * MIB


def test_what_was_read_is_let_go(store: Store) -> None:
    """The same in a schedule of lengths, to and fro."""
    phases = [batches(store, SentencePair(length), ClozeMasking()) for length in (32, 64)]
    made = Phases([0, 400], phases)

    def read_all() -> None:
        read(made, range(0, 800))

    kept, _ = traced(read_all, read_all)
    assert kept < 64 * KIB


class Many:
    """A thousand million examples, of which only their number is known."""

    n = 10**9
    paired = False


def test_an_order_of_a_thousand_million_is_never_made(store: Store) -> None:
    form = DocSentences(32)
    made = Batches(store, Many(), form, pair_objective("none"), ClozeMasking(), 0, ROWS)  # type: ignore[arg-type]
    seen: list[np.ndarray] = []

    def go() -> None:
        rng = np.random.default_rng(1)
        for start in rng.integers(0, 3 * Many.n // ROWS, 100).tolist():
            for step in range(start, start + 3):
                seen.extend(examples for _, examples in made.rows(step))
        seen.extend(examples for _, examples in made.rows(Many.n // ROWS))

    kept, peak = traced(lambda: None, go)
    found = np.concatenate(seen)
    assert found.min() >= 0
    assert Many.n // 2 < found.max() < Many.n
    # A block of the order has 32 KiB, a whole order would have 8 GB.
    assert peak < 2 * MIB
    assert kept < 2 * MIB


def held(process: psutil.Process) -> int:
    """Bytes of memory, those of mapped files and of tensors on their way between processes too."""
    return int(process.memory_info().rss)


def loader_memory(batches: Batches, workers: int) -> Iterator[tuple[int, int]]:
    """(bytes of this process, of its workers) at the end of each epoch."""
    epochs = 7
    last = steps_of(batches, epochs - 1).stop
    here = psutil.Process()
    others = set(here.children())
    loader = ClozeData(batches, total_steps=last, workers=workers).train_dataloader(rank=0, world=1)
    ends = {steps_of(batches, epoch).stop - 1 for epoch in range(epochs)}
    for step, _ in enumerate(loader):
        if step in ends:
            gc.collect()
            yield held(here), sum(held(child) for child in set(here.children()) - others)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("case", ["pairs", "packed spans"])
def test_a_loader_over_epochs_does_not_grow(store: Store, case: str, workers: int) -> None:
    made = CASES[case](store)
    size = sum(array.nbytes for array in made.batch(0).values()) * len(steps_of(made, 0))
    assert size > MIB
    own, of_workers = zip(*loader_memory(made, workers), strict=True)
    # The allocator needs some epochs to find its size; from the fourth on three more add less than one would.
    assert own[-1] - own[3] < size
    if workers:
        assert min(of_workers) > MIB
        assert of_workers[-1] - of_workers[3] < size
