"""Token masking: the right number, never a special token, 80/10/10, static and dynamic."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from datahelp import small_store
from hypothesis import given, settings
from hypothesis import strategies as st

from clozelab.data.masking.causal import CausalTargets
from clozelab.data.masking.cloze import IGNORED, ClozeMasking
from clozelab.data.tokenizers import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return small_store(tmp_path_factory.mktemp("store")).tokenizer


def rows(tokenizer: Tokenizer, lengths: list[int], S: int, seed: int = 0) -> tuple[npt.NDArray, npt.NDArray]:
    """Sequences with so many ordinary tokens each, a special one in between now and then."""
    rng = np.random.default_rng(seed)
    ids = np.full((len(lengths), S), tokenizer.pad_id, dtype=np.int64)
    for row, n in enumerate(lengths):
        ids[row, 1 : 1 + n] = rng.choice(tokenizer.ordinary_ids, n)
        ids[row, 0], ids[row, 1 + n] = tokenizer.cls_id, tokenizer.sep_id
        if n > 4:
            ids[row, 3] = tokenizer.mask_id  # stands in the text already
    return ids, ~np.isin(ids, list(tokenizer.special_ids))


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    rate=st.floats(0.01, 1),
    seed=st.integers(0, 99),
    epoch=st.integers(0, 99),
)
def test_targets(tokenizer: Tokenizer, lengths: list[int], rate: float, seed: int, epoch: int) -> None:
    S = 48
    masking = ClozeMasking(rate=rate)
    ids, maskable = rows(tokenizer, lengths, S)
    before = ids.copy()
    examples = np.arange(len(lengths)) * 7
    new, positions, targets = masking(ids, maskable, tokenizer, seed=seed, epoch=epoch, example_ids=examples)
    assert np.array_equal(ids, before)
    assert positions.shape == targets.shape == (len(lengths), masking.targets(S))
    for row in range(len(lengths)):
        used = targets[row] != IGNORED
        n = int(maskable[row].sum())
        assert used.sum() == min(n, max(1, round(rate * n)))
        assert (positions[row][~used] == 0).all()
        at = positions[row][used]
        assert (np.diff(at) > 0).all()
        assert maskable[row, at].all()
        assert np.array_equal(targets[row][used], before[row, at])
        changed = np.flatnonzero(new[row] != before[row])
        assert np.isin(changed, at).all()
        assert np.isin(new[row, at], [tokenizer.mask_id, *tokenizer.ordinary_ids]).all()


def test_pure_however_the_batch_is_split(tokenizer: Tokenizer) -> None:
    ids, maskable = rows(tokenizer, [30, 20, 10, 25, 5, 0], 40)
    examples = np.asarray([9, 4, 11, 2, 0, 7])
    masking = ClozeMasking()
    whole = masking(ids, maskable, tokenizer, seed=1, epoch=2, example_ids=examples)
    for n in (1, 2, 3):
        for start in range(0, 6, n):
            here = slice(start, start + n)
            part = masking(ids[here], maskable[here], tokenizer, seed=1, epoch=2, example_ids=examples[here])
            for one, two in zip(part, whole, strict=True):
                assert np.array_equal(one, two[here])


def patterns(masking: ClozeMasking, tokenizer: Tokenizer, epochs: int) -> list[bytes]:
    ids, maskable = rows(tokenizer, [40], 48)
    return [
        masking(ids, maskable, tokenizer, seed=0, epoch=epoch, example_ids=np.asarray([3]))[0].tobytes()
        for epoch in range(epochs)
    ]


def test_static_has_k_patterns_and_dynamic_one_each_time(tokenizer: Tokenizer) -> None:
    for k in (1, 4):
        found = patterns(ClozeMasking(copies=k), tokenizer, 12)
        assert len(set(found)) == k
        assert found[:k] * (12 // k) == found
    assert len(set(patterns(ClozeMasking(), tokenizer, 12))) == 12
    # The copies are the first epochs of dynamic masking: the arms share what they can share.
    assert patterns(ClozeMasking(copies=4), tokenizer, 4) == patterns(ClozeMasking(), tokenizer, 4)


@pytest.mark.parametrize("corruption", [[0.8, 0.1, 0.1], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.2, 0.3]])
def test_shares_of_corruption(tokenizer: Tokenizer, corruption: list[float]) -> None:
    ids, maskable = rows(tokenizer, [100] * 400, 128)
    masking = ClozeMasking(corruption=corruption)
    new, positions, targets = masking(ids, maskable, tokenizer, seed=0, epoch=0, example_ids=np.arange(400))
    used = targets != IGNORED
    got = np.take_along_axis(new, positions, axis=1)[used]
    want = targets[used]
    n = len(want)
    kept_by_chance = 1 / len(tokenizer.ordinary_ids)
    shares = [
        corruption[0],
        corruption[1] * (1 - kept_by_chance),
        corruption[2] + corruption[1] * kept_by_chance,
    ]
    counts = [(got == tokenizer.mask_id).sum(), ((got != tokenizer.mask_id) & (got != want)).sum(), (got == want).sum()]
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - n * share) <= 4 * np.sqrt(n * share * (1 - share)) + 1e-9


def test_every_position_is_as_likely_and_random_tokens_too(tokenizer: Tokenizer) -> None:
    ids, maskable = rows(tokenizer, [60] * 4000, 64)
    masking = ClozeMasking(corruption=[0, 1, 0])
    new, positions, targets = masking(ids, maskable, tokenizer, seed=5, epoch=0, example_ids=np.arange(4000))
    used = targets != IGNORED
    counts = np.bincount(positions[used], minlength=64)[maskable[0]]
    expected = counts.sum() / len(counts)
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)
    drawn = np.take_along_axis(new, positions, axis=1)[used]
    counts = np.bincount(drawn, minlength=tokenizer.vocab_size)
    assert counts[list(tokenizer.special_ids)].sum() == 0
    expected = len(drawn) / len(tokenizer.ordinary_ids)
    assert np.abs(counts[tokenizer.ordinary_ids] - expected).max() < 6 * np.sqrt(expected)


def test_settings(tmp_path: Path) -> None:
    for bad, key in (
        ({"rate": 0.0}, "rate"),
        ({"rate": 1.5}, "rate"),
        ({"corruption": [0.8, 0.1]}, "corruption"),
        ({"corruption": [0.8, 0.3, -0.1]}, "corruption"),
        ({"corruption": [0.8, 0.1, 0.2]}, "corruption"),
        ({"copies": 0}, "copies"),
    ):
        with pytest.raises(ValueError, match=rf"masking\.{key} is"):
            ClozeMasking(**bad)  # type: ignore[arg-type]


def test_the_next_token_is_the_target(tokenizer: Tokenizer) -> None:
    ids, maskable = rows(tokenizer, [10, 38, 0], 40)
    causal = CausalTargets()
    new, positions, targets = causal(ids, maskable, tokenizer, seed=0, epoch=0, example_ids=np.arange(3))
    assert np.array_equal(new, ids)
    assert positions.shape == targets.shape == (3, causal.targets(40))
    for row, n in enumerate([10, 38, 0]):
        used = targets[row] != IGNORED
        assert positions[row][used].tolist() == list(range(n + 1))
        assert targets[row][used].tolist() == ids[row, 1 : n + 2].tolist()
        assert targets[row][used][-1] == tokenizer.sep_id  # the end is learnt too
