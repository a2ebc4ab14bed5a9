"""What is hidden together: units, how many are drawn, and the laws of their lengths."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import scipy.stats
from datahelp import small_store
from hypothesis import given, settings
from hypothesis import strategies as st

from clozelab import seeds
from clozelab.data.masking.cloze import IGNORED, ClozeMasking
from clozelab.data.masking.selection import Selection, choose, numbered
from clozelab.data.masking.selections.ngram import NgramSelection
from clozelab.data.masking.selections.phrases import PhraseSelection
from clozelab.data.masking.selections.span import SpanSelection
from clozelab.data.masking.selections.whole_word import WholeWordSelection
from clozelab.data.store import Store
from clozelab.data.tokenizers import Tokenizer


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return small_store(tmp_path_factory.mktemp("store"))


def plain_choice(units: list[int], count: int, draws: npt.NDArray[np.uint64]) -> list[bool]:
    """One row, unit by unit."""
    sizes = {unit: units.count(unit) for unit in set(units) if unit >= 0}
    left, taken = count, set()
    for unit in sorted(sizes, key=lambda unit: draws[unit]):
        if sizes[unit] <= left:
            taken.add(unit)
            left -= sizes[unit]
    if not taken and sizes and count:
        first = min(sizes, key=lambda unit: draws[unit])
        places = [place for place, unit in enumerate(units) if unit == first][:count]
        return [place in places for place in range(len(units))]
    return [unit in taken for unit in units]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=12, max_size=12), min_size=1, max_size=4), st.integers(0, 999))
def test_choosing_all_at_once_is_choosing_one_by_one(steps: list[list[int]], seed: int) -> None:
    # A step of 0 stays in the unit, 5 leaves the text, others begin the next unit.
    kind_BS = np.asarray(steps)
    maskable_BS = kind_BS != 5
    unit_BS = numbered(kind_BS > 0, maskable_BS)
    count_B = np.minimum(np.arange(len(steps)) % 7, maskable_BS.sum(axis=1))
    draws_BS = seeds.bits(seed, "test", (), np.arange(len(steps)), 12)
    got_BS = choose(unit_BS, count_B, draws_BS)
    for row in range(len(steps)):
        assert got_BS[row].tolist() == plain_choice(unit_BS[row].tolist(), int(count_B[row]), draws_BS[row])


@pytest.mark.parametrize("selection", [NgramSelection(), SpanSelection(), SpanSelection(p=0.5, longest=4)], ids=str)
def test_lengths_of_runs_follow_their_law(selection: NgramSelection | SpanSelection) -> None:
    B, S = 4000, 128
    starts_BS = np.ones((B, S), dtype=bool)
    draws_BS = seeds.bits(3, "law", (), np.arange(B), S)
    ids_BS, text_BS = np.zeros((B, S), dtype=np.int64), np.ones((B, S), dtype=bool)
    unit_BS = selection.units(ids_BS, text_BS, starts_BS, None, draws_BS)  # type: ignore[arg-type]
    flat = (unit_BS + np.arange(B)[:, None] * (S + 1)).ravel()
    lengths = np.bincount(flat)
    last = np.zeros(len(lengths), dtype=bool)
    last[unit_BS[:, -1] + np.arange(B) * (S + 1)] = True  # cut short by the end of the row
    # Of what begins early enough never to be cut, which leaves the law as it is.
    begins = np.concatenate([[0], np.cumsum(lengths)])[:-1] % S
    counted = (lengths > 0) & ~last & (begins < S - 2 * len(selection.law))
    observed = np.bincount(lengths[counted], minlength=len(selection.law) + 1)[1:]
    assert observed.sum() > 50_000
    assert scipy.stats.chisquare(observed, selection.law * observed.sum()).pvalue > 1e-4
    assert selection.law.sum() == pytest.approx(1)


def test_the_laws_are_those_of_the_papers() -> None:
    assert NgramSelection().law.tolist() == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    span = SpanSelection().law
    assert (span * np.arange(1, 11)).sum() == pytest.approx(3.8, abs=0.05)  # SpanBERT, section 3.1
    assert (span[1:] / span[:-1]).tolist() == pytest.approx([0.8] * 9)


def rows(store: Store, n: int, S: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    ids = np.resize(np.asarray(store.ids, dtype=np.int64), (n, S)).copy()
    ids[:, 0] = store.tokenizer.cls_id
    return ids, ~np.isin(ids, list(store.tokenizer.special_ids))


def mask(masking: ClozeMasking, store: Store, ids: npt.NDArray, maskable: npt.NDArray, **more: int) -> tuple:
    starts = store.tokenizer.word_starts
    assert starts is not None
    key = {"seed": 0, "epoch": 0} | more
    return masking(ids, maskable, store.tokenizer, example_ids=np.arange(len(ids)), starts_word_BS=starts(ids), **key)


@pytest.mark.parametrize("selection", [WholeWordSelection(), NgramSelection(), SpanSelection()], ids=str)
def test_no_word_is_hidden_in_part(store: Store, selection: Selection) -> None:
    ids, maskable = rows(store, 64, 64)
    masking = ClozeMasking(selection=selection)
    _, positions, targets = mask(masking, store, ids, maskable)
    chosen = np.zeros(ids.shape, dtype=bool)
    row, slot = np.nonzero(targets != IGNORED)
    chosen[row, positions[row, slot]] = True
    starts = store.tokenizer.word_starts
    assert starts is not None
    word = numbered(starts(ids), maskable)
    for n in range(len(ids)):
        hidden = set(word[n][chosen[n]].tolist())
        assert np.array_equal(chosen[n], np.isin(word[n], list(hidden)))


def test_one_decision_a_span(store: Store) -> None:
    ids, maskable = rows(store, 200, 64)
    selection = SpanSelection()
    apart, together = (ClozeMasking(selection=selection, together=both) for both in (False, True))
    mixed = []
    for masking in (apart, together):
        new, positions, targets = mask(masking, store, ids, maskable)
        row, slot = np.nonzero(targets != IGNORED)
        at = positions[row, slot]
        # Neighbours at most: hidden ones beside kept or exchanged ones.
        next_to = (np.diff(row) == 0) & (np.diff(at) == 1)
        hidden = new[row, at] == store.tokenizer.mask_id
        mixed.append((hidden[1:] != hidden[:-1])[next_to].mean())
        assert abs(hidden.mean() - 0.8) < 0.05
    assert mixed[1] < 0.5 * mixed[0]


def test_rates(store: Store) -> None:
    ids, maskable = rows(store, 400, 64)
    n = maskable.sum(axis=1)

    def shares(masking: ClozeMasking, **more: int) -> npt.NDArray[np.float64]:
        _, _, targets = mask(masking, store, ids, maskable, **more)
        return np.asarray((targets != IGNORED).sum(axis=1) / n)

    linear = ClozeMasking(rate=0.4, rate_law="linear", rate_to=0.1, rate_steps=100)
    for step, rate in ((0, 0.4), (50, 0.25), (100, 0.1), (999, 0.1)):
        assert shares(linear, step=step).mean() == pytest.approx(rate, abs=0.01)
    uniform = shares(ClozeMasking(rate=0.1, rate_law="uniform", rate_to=0.5))
    assert (uniform.min(), uniform.max()) == pytest.approx((0.1, 0.5), abs=0.02)
    assert uniform.mean() == pytest.approx(0.3, abs=0.02)
    drawn = shares(ClozeMasking(rate=0.15, count="bernoulli")) * n
    expected = scipy.stats.binom(int(n.mean()), 0.15)
    assert abs(drawn.mean() - expected.mean()) < 3 * expected.std() / np.sqrt(len(n))
    assert drawn.var() == pytest.approx(expected.var(), rel=0.25)


def test_fewer_are_asked_for_than_are_hidden(store: Store) -> None:
    ids, maskable = rows(store, 100, 64)
    masking = ClozeMasking(rate=0.4, predicted=0.5, corruption=[1, 0, 0])
    new, positions, targets = mask(masking, store, ids, maskable)
    hidden = (new == store.tokenizer.mask_id) & maskable
    asked = targets != IGNORED
    assert hidden.sum() == pytest.approx(0.4 * maskable.sum(), rel=0.02)
    assert asked.sum() == pytest.approx(0.2 * maskable.sum(), rel=0.05)
    row, slot = np.nonzero(asked)
    assert hidden[row, positions[row, slot]].all()
    assert np.array_equal(targets[asked], ids[row, positions[row, slot]])
    assert positions.shape[1] == masking.targets(64)


def test_masks_last_as_long_as_they_are_told_to(store: Store) -> None:
    ids, maskable = rows(store, 8, 64)
    masking = ClozeMasking(refresh=3)
    seen = [mask(masking, store, ids, maskable, epoch=epoch)[0].tobytes() for epoch in range(9)]
    assert [seen.index(one) for one in seen] == [0, 0, 0, 3, 3, 3, 6, 6, 6]


def test_phrases_of_a_list(store: Store, tmp_path: Path) -> None:
    tokenizer = store.tokenizer
    path = tmp_path / "phrases.txt"
    path.write_text("river mountain\nriver mountain senate\ntariff harvest\nunheard\n", encoding="utf-8")
    selection = PhraseSelection(path=str(path))
    selection.check(tokenizer)
    text = ["village", "river", "mountain", "senate", "tariff", "harvest", "river", "tariff"]
    ids = tokenizer.encode_batch([" ".join(text)])[0][None]
    starts = tokenizer.word_starts
    assert starts is not None
    no_draws = np.zeros_like(ids, dtype=np.uint64)
    units = selection.units(ids, np.ones_like(ids, dtype=bool), starts(ids), tokenizer, no_draws)
    word = numbered(starts(ids), np.ones_like(ids, dtype=bool))[0]
    of_word = [sorted(set(units[0][word == n].tolist())) for n in range(len(text))]
    assert of_word == [[0], [1], [1], [1], [2], [2], [3], [4]]  # the longest phrase, and single words


def test_bad_lists_and_vocabularies_are_named(store: Store, tmp_path: Path) -> None:
    (tmp_path / "wide.txt").write_bytes("river mountain".encode("utf-16"))
    wide = str(tmp_path / "wide.txt")
    for path, what in (("", "is empty"), (str(tmp_path / "none.txt"), "no file"), (wide, "is not UTF-8 text")):
        with pytest.raises(ValueError, match=rf"masking\.selection\.path.*{what}"):
            PhraseSelection(path=path).check(store.tokenizer)
    blind = Tokenizer(store.tokenizer.inner, "vocab.txt")
    blind.word_starts = None
    with pytest.raises(ValueError, match=r"vocab\.txt does not tell where words begin"):
        WholeWordSelection().check(blind)


@pytest.mark.parametrize(
    ("key", "settings_"),
    [
        ("rate_to", {"rate_law": "linear", "rate_steps": 5}),
        ("rate_to", {"rate_to": 0.3}),
        ("rate_steps", {"rate_law": "linear", "rate_to": 0.3}),
        ("rate_law", {"rate_law": "cosine"}),
        ("count", {"count": "poisson"}),
        ("predicted", {"predicted": 0.0}),
        ("refresh", {"refresh": 0}),
    ],
)
def test_impossible_settings_are_named(key: str, settings_: dict) -> None:
    with pytest.raises(ValueError, match=rf"masking\.{key} is"):
        ClozeMasking(**settings_)
