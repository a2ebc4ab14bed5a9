"""Batches are the same bits whoever makes them: worker processes, ranks, a run that went on, another interpreter.

What is compared with is always a fresh `Batches` that is asked for one step alone: nothing kept from steps before it.
"""

import copy
import functools
import hashlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datahelp import WORDS, small_store

from clozelab.data.batches import Batch, Batches
from clozelab.data.corpora.text import Text
from clozelab.data.format import FormatOption
from clozelab.data.loading import ClozeData
from clozelab.data.masking.causal import CausalTargets
from clozelab.data.masking.cloze import ClozeMasking
from clozelab.data.masking.selections.ngram import NgramSelection
from clozelab.data.masking.selections.phrases import PhraseSelection
from clozelab.data.masking.selections.span import SpanSelection
from clozelab.data.masking.selections.whole_word import WholeWordSelection
from clozelab.data.pairs import pair_objective
from clozelab.data.phases import Phases
from clozelab.data.store import Store, open_store, read_store
from clozelab.data.tokenizers import FileOption
from clozelab.options import discover, registered
from clozelab.running.compose import compose_run, composer
from clozelab.training.reading import reading

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")

Masking = ClozeMasking | CausalTargets

discover("clozelab.data")
FORMATS: dict[str, type] = registered("format")
SELECTIONS: dict[str, Callable[[], Masking]] = {
    "token": ClozeMasking,
    "whole_word": lambda: ClozeMasking(selection=WholeWordSelection()),
    "span": lambda: ClozeMasking(selection=SpanSelection(), together=True),
    "causal": CausalTargets,
}
POLICIES: dict[str, Callable[[], Masking]] = {
    "static": lambda: ClozeMasking(copies=2),
    "refresh": lambda: ClozeMasking(refresh=2),
    "linear": lambda: ClozeMasking(rate=0.4, rate_law="linear", rate_to=0.1, rate_steps=400),
    "uniform": lambda: ClozeMasking(rate=0.1, rate_law="uniform", rate_to=0.4),
    "bernoulli": lambda: ClozeMasking(count="bernoulli", predicted=0.5),
    "ngram": lambda: ClozeMasking(selection=NgramSelection()),
}


def formats() -> list[tuple[str, str]]:
    """Every registered format with every pair objective that it can carry."""
    return [
        (name, pair)
        for name, cls in FORMATS.items()
        for pair in (("none", "next", "order") if cls(max_length=32).style.segments else ("none",))
    ]


CASES = [
    *((form, pair, masking, "cloze") for form, pair in formats() for masking in SELECTIONS),
    *(("packed", "none", masking, "cloze") for masking in POLICIES),
    *(("sentence_pair", "order", masking, "cloze") for masking in POLICIES),
    # A task whose model draws tokens: batches bring it the numbers to draw them with.
    *((form, pair, "token", "replaced") for form, pair in formats()),
    *(("packed", "none", masking, "replaced") for masking in ("span", *POLICIES)),
    *(("sentence_pair", "order", masking, "replaced") for masking in ("whole_word", *POLICIES)),
]
of_cases = pytest.mark.parametrize(("form", "pair", "masking", "task"), CASES, ids=["-".join(case) for case in CASES])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return small_store(tmp_path_factory.mktemp("store"))


@functools.lru_cache(maxsize=32)
def _examples(path: Path, form: str) -> Any:
    return FORMATS[form](max_length=32).examples(read_store(path), "train")


def fresh(store: Store, form: str, pair: str, masking: str, task: str = "cloze") -> Batches:
    """Batches that have made nothing yet."""
    made: FormatOption = FORMATS[form](max_length=32)
    policy, examples = (SELECTIONS | POLICIES)[masking](), _examples(store.path, form)
    sampled: bool = registered("task")[task].samples  # type: ignore[attr-defined]
    return Batches(store, examples, made, pair_objective(pair), policy, 5, rows(examples.n), sampled=sampled)


def rows(n: int) -> int:
    """Rows of a batch: two ranks can part them, and three, and no epoch of n examples ends with a batch."""
    return next(size for size in (6, 12, 18, 24, 30) if n % size)


def same(one: Batch, two: Batch) -> bool:
    return one.keys() == two.keys() and all(
        one[key].dtype == two[key].dtype and one[key].shape == two[key].shape and np.array_equal(one[key], two[key])
        for key in one
    )


def arrays(batches: Iterable[dict[str, torch.Tensor]]) -> list[Batch]:
    return [{key: value.numpy() for key, value in batch.items()} for batch in batches]


def loaded(batches: Batches | Phases, workers: int, start: int, stop: int, rank: int, world: int) -> list[Batch]:
    data = ClozeData(batches, total_steps=stop, start_step=start, workers=workers)
    return arrays(data.train_dataloader(rank=rank, world=world))


def check_loaders(new: Callable[[], Batches | Phases], start: int, stop: int) -> None:
    """Without workers, with one, with three; alone and as two ranks; from `start` and from later on: the same steps."""
    want = [new().batch(step) for step in range(start, stop)]
    assert len({batch["input_ids"].tobytes() for batch in want}) == len(want)
    later = start + (stop - start) // 2
    for workers, first, world in ((0, start, 1), (0, later, 1), (0, later, 2), (1, start, 1), (3, later, 2)):
        for rank in range(world):
            part = loaded(new(), workers, first, stop, rank, world)
            of_rank = [{key: array[rank::world] for key, array in batch.items()} for batch in want[first - start :]]
            assert len(part) == len(of_rank) > 0
            assert all(same(one, two) for one, two in zip(part, of_rank, strict=True))


def border(batches: Batches) -> int:
    """The step that runs over the border of the first two epochs."""
    return batches.examples.n // batches.batch_size


@pytest.mark.slow
@of_cases
def test_workers_ranks_and_the_first_step_change_nothing(
    store: Store, form: str, pair: str, masking: str, task: str
) -> None:
    new = functools.partial(fresh, store, form, pair, masking, task)
    at = border(new())
    assert len(new().rows(at)) == 2
    check_loaders(new, at - 3, at + 3)


@of_cases
def test_any_order_of_asking_gives_the_same(store: Store, form: str, pair: str, masking: str, task: str) -> None:
    new = functools.partial(fresh, store, form, pair, masking, task)
    one, at = new(), border(new())
    for step in (at, 0, 10**6, at + 1, 1, at):
        whole = new().batch(step)
        assert ("target_draws" in whole) == (task == "replaced")
        assert same(one.batch(step), whole)
        for rank in (1, 0, 2):
            assert same(one.batch(step, rank, 3), {key: array[rank::3] for key, array in whole.items()})
    # What a worker gets where processes are spawned, not forked.
    assert same(pickle.loads(pickle.dumps(one)).batch(at), new().batch(at))


@pytest.mark.parametrize("world", [4, 5, 7, 100])
def test_ranks_that_cannot_part_a_batch_evenly_are_refused(store: Store, world: int) -> None:
    made = fresh(store, "packed", "none", "token")
    assert made.batch_size % world
    message = f"^{world} ranks cannot part a batch of {made.batch_size} sequences evenly$"
    for rank in (0, world - 1):
        with pytest.raises(ValueError, match=message):
            made.batch(0, rank, world)
        with pytest.raises(ValueError, match=message):
            Phases([0], [made]).batch(1, rank, world)
        with pytest.raises(ValueError, match=message):
            loaded(made, 0, 0, 2, rank, world)


@pytest.mark.parametrize("masking", ["token", "static", "bernoulli"])
def test_draws_of_targets_are_new_each_epoch_and_change_nothing_else(store: Store, masking: str) -> None:
    plain = fresh(store, "sentence_pair", "order", masking)
    drawn = fresh(store, "sentence_pair", "order", masking, "replaced")
    n, epochs, found = plain.examples.n, 3, {}
    for step in range(epochs * n // plain.batch_size):
        batch, at = drawn.batch(step), step * plain.batch_size
        draws_BK = batch.pop("target_draws")
        assert same(batch, plain.batch(step))
        assert draws_BK.dtype == np.float32
        assert draws_BK.shape == batch["target_ids"].shape
        assert ((draws_BK >= 0) & (draws_BK < 1)).all()
        for row, example in enumerate(batch["example_ids"].tolist()):
            found[(at + row) // n, example] = draws_BK[row].tobytes()
    assert len(found) > 2 * n
    assert len(set(found.values())) == len(found)


@pytest.mark.parametrize("masking", ["token", "linear"])
def test_what_is_done_to_a_batch_stays_with_it(store: Store, masking: str) -> None:
    made, new = fresh(store, "packed", "none", masking), fresh(store, "packed", "none", masking)
    for array in made.batch(0).values():
        array[...] = 0
    assert same(made.batch(0), new.batch(0))
    assert same(made.batch(1), new.batch(1))


def digest(store: Store) -> str:
    """Of two batches of every case."""
    found = hashlib.sha256()
    for case in CASES:
        made = fresh(store, *case)
        for step in (border(made), 3):
            for key, array in sorted(made.batch(step).items()):
                found.update(key.encode() + array.tobytes())
    return found.hexdigest()


def test_another_interpreter_makes_the_same(store: Store) -> None:
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]);"
        "from test_determinism import digest; from clozelab.data.store import read_store;"
        "print(digest(read_store(Path(sys.argv[1]))))"
    )
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    command = [sys.executable, "-c", code, str(store.path), str(Path(__file__).parent)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest(store)


def scheduled(store: Store, *overrides: str) -> Phases:
    """The batches of a run with two lengths."""
    chosen = ["lengths=[[0.5,16],[1,32]]", "format.max_length=32", "budget=steps", "budget.steps=80"]
    with composer():
        config = compose_run([*chosen, "evaluation=[heldout_mlm]", *overrides])
    return reading(config, store).phases


SCHEDULES = {
    "rows": ["batch_size=6"],
    "tokens": ["batch_tokens=250", "trainer.devices=2"],
    "packed spans": ["batch_tokens=250", "trainer.devices=2", "format=packed", "masking=span"],
    "pairs, static": ["batch_size=6", "format=sentence_pair", "task=mlm_sop", "masking=static", "masking.copies=2"],
    "replaced tokens": ["batch_size=6", "task=replaced_tokens", "evaluation=[heldout_replaced]"],
    "accumulated": ["batch_tokens=300", "trainer.devices=2", "trainer.accumulate=2", "format=doc_sentences"],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_length_schedules_and_batches_of_tokens(store: Store, schedule: str) -> None:
    phases = scheduled(store, *SCHEDULES[schedule])
    (_, change), sizes = phases.first_steps, [one.batch_size for one in phases.phases]
    assert all(size % 2 == 0 for size in sizes)
    if any(override.startswith("batch_tokens") for override in SCHEDULES[schedule]):
        assert sizes[0] > sizes[1]

    def new() -> Phases:
        return Phases(phases.first_steps, [copy.copy(one) for one in phases.phases])

    assert [batch["input_ids"].shape for batch in (new().batch(change - 1), new().batch(change))] == [
        (sizes[0], 16),
        (sizes[1], 32),
    ]
    check_loaders(new, change - 3, change + 3)


def test_a_rate_that_moves_goes_on_across_lengths(store: Store) -> None:
    rate = ["masking.rate=0.9", "masking.rate_law=linear", "masking.rate_to=0.1", "masking.rate_steps=80"]
    phases = scheduled(store, "batch_size=32", "format=doc_sentences", *rate)
    assert phases.first_steps == [0, 40]
    for step in (0, 20, 39, 40, 60, 80, 200):
        batch = phases.batch(step)
        share = (batch["target_ids"] != -100).sum() / (batch["attention_mask"].sum() - 2 * 32)
        assert share == pytest.approx(0.9 - 0.8 * min(step / 80, 1), abs=0.02)


def test_phrases_of_a_list(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "phrases.txt"
    path.write_text("\n".join(f"{a} {b}" for a in WORDS for b in WORDS), encoding="utf-8")
    form = FORMATS["full_sentences"](max_length=32)
    policy, examples = ClozeMasking(selection=PhraseSelection(path=str(path))), form.examples(store, "train")

    def new() -> Batches:
        return Batches(store, examples, form, pair_objective("none"), policy, 5, rows(examples.n))

    at = border(new())
    check_loaders(new, at - 3, at + 3)


def test_words_of_a_segmenter(tmp_path: Path) -> None:
    pytest.importorskip("jieba", reason="needs jieba: pip install clozelab[zh]")
    rng = np.random.default_rng(3)
    clauses = [
        "我来到北京清华大学",
        "他在大学里学习自然语言处理",
        "今天天气很好",
        "中国历史非常悠久",
        "我们一起去图书馆",
    ]
    for n in range(8):
        text = "".join("，".join(rng.choice(clauses, size=rng.integers(1, 4))) + "。" for _ in range(40))
        (tmp_path / f"{n}.zh").write_text(text, encoding="utf-8")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set("".join(clauses) + "，。"))]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    corpus = Text(paths=[str(tmp_path / "*.zh")], language="zh", validation=0)
    store = open_store(corpus, FileOption(path=str(tmp_path / "vocab.txt"), words="jieba"), tmp_path / "cache")
    assert store.words is not None
    for form, pair, masking in (
        ("packed", "none", "whole_word"),
        ("sentence_pair", "order", "whole_word"),
        ("segment_pair", "next", "span"),
    ):
        new = functools.partial(fresh, store, form, pair, masking)
        at = border(new())
        check_loaders(new, at - 3, at + 3)
