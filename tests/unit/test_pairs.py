"""Pair objectives: labels tell the truth, strangers are strangers, draws are pure."""

from pathlib import Path

import numpy as np
import pytest
from datahelp import small_corpus, small_store
from hypothesis import given
from hypothesis import strategies as st

from clozelab.data.corpora.text import Text
from clozelab.data.examples import Examples
from clozelab.data.formats.segment_pair import SegmentPair
from clozelab.data.pairs import pair_objective
from clozelab.data.store import open_store
from clozelab.data.task import TaskOption
from clozelab.data.tokenizers import WordPieceOption

NAMES = ("none", "next", "order")


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Examples:
    return SegmentPair(max_length=64).examples(small_store(tmp_path_factory.mktemp("store")), "train")


def made_up(sizes: list[int], contents: list[int]) -> Examples:
    """Documents of so many pairs with such text hashes; segments of one token."""
    pairs = sum(sizes)
    return Examples(
        segments=np.stack([np.arange(2 * pairs), np.arange(2 * pairs) + 1], axis=1),
        segment_document=np.repeat(np.arange(len(sizes)), 2 * np.asarray(sizes)),
        first=2 * np.arange(pairs),
        sizes=np.full(pairs, 2),
        content=np.repeat(np.asarray(contents, dtype=np.uint64), sizes),
        counts={},
        split="train",
        corpus="made up",
        paired=True,
    )


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=2, max_size=12),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_strangers_come_from_other_texts(documents: list[tuple[int, int]], seed: int, epoch: int) -> None:
    made = made_up([size for size, _ in documents], [content for _, content in documents])
    if len({content for _, content in documents}) == 1:
        with pytest.raises(ValueError, match="needs two documents with different texts"):
            pair_objective("next").check(made)
        return
    indices = np.arange(made.n)
    first, second, labels = pair_objective("next").draw(made, indices, seed, epoch)
    assert np.array_equal(first, made.first)
    assert np.array_equal(second[labels == 0], first[labels == 0] + 1)
    content_of_segment = np.repeat(made.content, 2)
    strangers = labels == 1
    assert (content_of_segment[second[strangers]] != made.content[strangers]).all()


def test_strangers_are_uniform_over_what_is_allowed() -> None:
    made = made_up([3, 1, 2, 4], [5, 6, 5, 7])  # documents 0 and 2 have the same text
    drawn = np.zeros(2 * made.n)
    for epoch in range(4000):
        _, second, labels = pair_objective("next").draw(made, np.asarray([1]), 0, epoch)
        drawn[second[labels == 1]] += 1
    allowed = [7, 13, 15, 17, 19]  # the second segments of documents 1 and 3
    assert drawn.sum() == drawn[allowed].sum()
    assert np.abs(drawn[allowed] - drawn.sum() / 5).max() < 4 * np.sqrt(drawn.sum() / 5)


def test_order_swaps(examples: Examples) -> None:
    indices = np.arange(examples.n)
    first, second, labels = pair_objective("order").draw(examples, indices, 0, 0)
    assert np.array_equal(np.minimum(first, second), examples.first)
    assert np.array_equal(np.maximum(first, second), examples.first + 1)
    assert np.array_equal(labels == 1, first > second)


def test_none_keeps(examples: Examples) -> None:
    first, second, labels = pair_objective("none").draw(examples, np.arange(examples.n), 0, 0)
    assert np.array_equal(second, first + 1)
    assert not labels.any()
    assert pair_objective("none").labels is None


@pytest.mark.parametrize("name", NAMES)
def test_draws_are_pure_and_change_with_the_epoch(examples: Examples, name: str) -> None:
    objective = pair_objective(name)
    indices = np.arange(examples.n)
    whole = objective.draw(examples, indices, 3, 5)
    back = objective.draw(examples, indices[::-1], 3, 5)
    for one, two in zip(whole, back, strict=True):
        assert np.array_equal(one, two[::-1])
    parts = [objective.draw(examples, part, 3, 5) for part in np.array_split(indices, 7)]
    for k in range(3):
        assert np.array_equal(np.concatenate([part[k] for part in parts]), whole[k])
    assert (name == "none") == np.array_equal(whole[2], objective.draw(examples, indices, 3, 6)[2])


@pytest.mark.parametrize("name", ["next", "order"])
def test_labels_are_even(examples: Examples, name: str) -> None:
    labels = np.concatenate(
        [pair_objective(name).draw(examples, np.arange(examples.n), 0, epoch)[2] for epoch in range(30)]
    )
    assert abs(labels.mean() - 0.5) < 4 * 0.5 / np.sqrt(len(labels))


def test_one_document_and_equal_documents_are_refused_by_name(tmp_path: Path) -> None:
    text = next(iter(small_corpus(tmp_path / "text", documents=1).read())).text
    for n in (1, 2):
        (tmp_path / f"{n}.txt").write_text(text, encoding="utf-8")
        corpus = Text(paths=[str(tmp_path / "?.txt")], validation=0)
        store = open_store(corpus, WordPieceOption(vocab_size=400), tmp_path / "cache")
        made = SegmentPair(max_length=64).examples(store, "train")
        with pytest.raises(ValueError, match=r"next \(NSP\) needs two documents .* train split of corpus text"):
            pair_objective("next").check(made)
        pair_objective("order").check(made)


def test_task() -> None:
    assert TaskOption(pair="order").objective.name == "order"
    with pytest.raises(ValueError, match=r"task\.pair: no pair objective nsp; there are next, none, order"):
        TaskOption(pair="nsp")
    with pytest.raises(ValueError, match=r"task\.pair_weight is -1"):
        TaskOption(pair_weight=-1)
