"""Labels of pair objectives must not leak through the surface of a sequence.

A linear model sees only what says nothing about meaning: first and last token of each segment, lengths, where the
separator stands, how much padding there is. On the packaged text it must not tell swapped from in order better than a
coin, nor random from next better than the overlap of topic words does.

Neighbours also share an author, and authors have long sentences or short ones. That is style, not construction, and
two controls part them: what either segment alone says, and strangers from the same document.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.optimize
import scipy.sparse

from clozelab import seeds
from clozelab.data.corpora.sotu import Sotu
from clozelab.data.examples import Examples
from clozelab.data.format import FormatOption
from clozelab.data.formats.segment_pair import CUTS, SegmentPair
from clozelab.data.pairs import pair_objective
from clozelab.data.store import Store, open_store
from clozelab.data.tokenizers import WordPieceOption
from clozelab.options import discover, registered

pytestmark = pytest.mark.slow

S = 128
Pairs = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]
Features = Callable[[Store, Examples, Pairs], list]
Draw = Callable[[Examples, int], Pairs]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return open_store(Sotu(), WordPieceOption(vocab_size=4096), tmp_path_factory.mktemp("cache"))


def one_hot(values: npt.NDArray, size: int) -> scipy.sparse.csr_matrix:
    n = len(values)
    return scipy.sparse.csr_matrix((np.ones(n), (np.arange(n), values)), shape=(n, size))


def lengths(store: Store, examples: Examples, pairs: Pairs) -> list:
    """Lengths of A and B one-hot (so that any function of either is linear), separator, padding."""
    a, b = examples.lengths[pairs[0]], examples.lengths[pairs[1]]
    numbers = np.stack([a + 1, S - 3 - a - b, a * b / S, np.abs(a - b)], axis=1) / S
    return [one_hot(a, S), one_hot(b, S), scipy.sparse.csr_matrix(numbers)]


def apart(store: Store, examples: Examples, pairs: Pairs) -> list:
    """Length, first and last token of A and of B, but nothing that A and B say only together."""
    a, b = examples.lengths[pairs[0]], examples.lengths[pairs[1]]
    return [one_hot(a, S), one_hot(b, S), *edges(store, examples, pairs)]


def edges(store: Store, examples: Examples, pairs: Pairs) -> list:
    """First and last token of A and of B."""
    found = []
    for segment in pairs[:2]:
        first, last = examples.segments[segment, 0], examples.segments[segment, 1] - 1
        found += [one_hot(store.ids[at].astype(np.int64), store.tokenizer.vocab_size) for at in (first, last)]
    return found


def surface(store: Store, examples: Examples, pairs: Pairs) -> list:
    return edges(store, examples, pairs) + lengths(store, examples, pairs)


def sentence_lengths(store: Store, examples: Examples, pairs: Pairs) -> list:
    """Would B's first sentence have fitted after A, and A's after B? In bins of six tokens; and the parts."""
    a, b = examples.lengths[pairs[0]], examples.lengths[pairs[1]]
    budget = (S - 3) // 2
    first = []
    for segment in pairs[:2]:
        begin = examples.segments[segment, 0]
        end = store.sentence_offsets[np.searchsorted(store.sentence_offsets, begin, side="right")]
        first.append(np.minimum(end - begin, budget))
    values = (budget - a - first[1], budget - b - first[0], a, b, first[0], first[1])
    return [one_hot(np.clip((value + budget) // 6, 0, 23), 24) for value in values]


def topic(store: Store, examples: Examples, pairs: Pairs) -> list:
    """How many tokens A and B share, rare ones counting more (summed inverse frequency in logarithms), in bins."""
    counts = np.bincount(store.ids, minlength=store.tokenizer.vocab_size)
    weight = np.log(len(store.ids) / np.maximum(counts, 1))
    overlap = np.asarray(
        [
            weight[np.intersect1d(store.ids[a0:a1], store.ids[b0:b1])].sum()
            for (a0, a1), (b0, b1) in zip(examples.segments[pairs[0]], examples.segments[pairs[1]], strict=True)
        ]
    )
    return [one_hot(np.clip(overlap.astype(int), 0, 99), 100)]


def of_objective(name: str) -> Draw:
    """The pairs of an objective in epoch 0."""
    return lambda examples, seed: pair_objective(name).draw(examples, np.arange(examples.n), seed, 0)


def within_document(examples: Examples, seed: int) -> Pairs:
    """Next against a second segment from elsewhere in the same document: same author, same topic."""
    coin_N, where_N = seeds.uniform(seed, "within", (), np.arange(examples.n), 2).T
    pool, label_N = examples.by_content, (coin_N < 0.5).astype(np.int64)
    other_N = pool.order[pool.first + np.floor(where_N * pool.size).astype(np.int64)]
    return examples.first, examples.first[np.where(label_N == 1, other_N, np.arange(examples.n))] + 1, label_N


def accuracy(store: Store, form: FormatOption, draw: Draw, seed: int, features: Features) -> tuple[float, float]:
    """(validation accuracy, its standard error at 1/2) of a logistic model fitted to the training split's pairs."""
    data = []
    for split in ("train", "validation"):
        examples = form.examples(store, split)
        pairs = draw(examples, seed)
        columns = features(store, examples, pairs)
        data.append((scipy.sparse.hstack([*columns, np.ones((examples.n, 1))]).tocsr(), pairs[2]))
    (X, y), (X_held, y_held) = data
    assert len(y) >= 10_000
    sign = 2 * y - 1

    def loss(w: npt.NDArray) -> tuple[float, npt.NDArray]:
        z = sign * (X @ w)
        return float(np.logaddexp(0, -z).sum() + 2.5 * w @ w), X.T @ (-sign / (1 + np.exp(z))) + 5.0 * w

    w = scipy.optimize.minimize(loss, np.zeros(X.shape[1]), jac=True, method="L-BFGS-B", options={"maxiter": 100}).x
    return float(((X_held @ w > 0) == y_held).mean()), float(0.5 / np.sqrt(len(y_held)))


def forms() -> list[FormatOption]:
    """Every registered format of two segments, under every cut and with some short segments where it has these."""
    discover("clozelab.data.formats")
    found: list[FormatOption] = []
    for cls in registered("format").values():
        if cls(max_length=S).style.segments:
            known = {field.name for field in dataclasses.fields(cls)}
            choices: dict[str, list[Any]] = {"cut": sorted(CUTS), "short_seq_prob": [0.0, 0.1]}
            axes = {key: values for key, values in choices.items() if key in known}
            found += [
                cls(max_length=S, **dict(zip(axes, values, strict=True)))
                for values in itertools.product(*axes.values())
            ]
    return found


def is_greedy(form: FormatOption) -> bool:
    return getattr(form, "cut", "") == "greedy"


FORMS = forms()
OF_SENTENCES = [form for form in FORMS if not isinstance(form, SegmentPair)]


def test_formats_were_found() -> None:
    assert len(FORMS) - len(OF_SENTENCES) == 4
    assert OF_SENTENCES


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_surface_does_not_tell_the_order(store: Store, form: FormatOption, seed: int) -> None:
    got, error = accuracy(store, form, of_objective("order"), seed, surface)
    assert abs(got - 0.5) <= 3 * error


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_surface_tells_next_no_better_than_topic_words(store: Store, form: FormatOption, seed: int) -> None:
    by_surface, error = accuracy(store, form, of_objective("next"), seed, surface)
    by_topic, _ = accuracy(store, form, of_objective("next"), seed, topic)
    assert by_topic > 0.6
    assert by_surface <= by_topic
    # Either segment alone looks the same whether the second one is next or random.
    by_parts, _ = accuracy(store, form, of_objective("next"), seed, apart)
    assert abs(by_parts - 0.5) <= 3 * error
    # Where segments fill a budget, so do their lengths together. Those of single sentences show whose they are (54 to
    # 55%, as the format's documentation says), which a stranger by the same author takes away.
    by_length, _ = accuracy(store, form, of_objective("next"), seed, lengths)
    if form in OF_SENTENCES:
        assert 0.53 < by_length < 0.54 + 3 * error
        by_length, _ = accuracy(store, form, within_document, seed, lengths)
    assert abs(by_length - 0.5) <= 3 * error


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_sentence_lengths_tell_what_the_documentation_says(store: Store, form: FormatOption, seed: int) -> None:
    by_order, error = accuracy(store, form, of_objective("order"), seed, sentence_lengths)
    by_next, _ = accuracy(store, form, of_objective("next"), seed, sentence_lengths)
    if is_greedy(form):  # 60% and 58%: greedy fill does leak, the less the more segments are short
        assert 0.55 < by_order <= 0.60 + error
        assert 0.55 < by_next <= 0.58 + 2 * error
    else:
        assert abs(by_order - 0.5) <= 3 * error
        style = 0.54 if form in OF_SENTENCES else 0.52
        assert by_next <= style + 3 * error
