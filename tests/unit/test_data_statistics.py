"""The laws of the draws over a million positions: rates, shares, lengths, labels, each against its exact distribution.

Seeds are fixed, so a test fails where the code changes and never by chance. A share is held against three standard
errors, a table against chi-square at 1 in 1000. Where a row has a fixed number of targets they are drawn without
replacement: the variances are those of the hypergeometric law, smaller than binomial ones.

Shapes: B rows, S positions, C counts or classes.
"""

import numpy as np
import numpy.typing as npt
import pytest
import scipy.stats
from datahelp import small_store

from clozelab import seeds
from clozelab.data.examples import Examples
from clozelab.data.masking.cloze import IGNORED, ClozeMasking
from clozelab.data.masking.selection import Selection
from clozelab.data.masking.selections.ngram import NgramSelection
from clozelab.data.masking.selections.span import SpanSelection
from clozelab.data.masking.selections.token import TokenSelection
from clozelab.data.masking.selections.whole_word import WholeWordSelection
from clozelab.data.pairs import pair_objective
from clozelab.data.tokenizers import Tokenizer

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

B, S = 8192, 130
M = 126  # tokens of text in a row; 8192 x 126 is over a million
LEVEL = 1e-3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return small_store(tmp_path_factory.mktemp("store")).tokenizer


@pytest.fixture(scope="module")
def rows(tokenizer: Tokenizer) -> tuple[Ints, Bools]:
    """Rows of M random ordinary tokens between special ones, and a little padding."""
    ids_BS = np.full((B, S), tokenizer.pad_id, dtype=np.int64)
    ids_BS[:, 0], ids_BS[:, M + 1] = tokenizer.cls_id, tokenizer.sep_id
    ids_BS[:, 1 : M + 1] = np.random.default_rng(11).choice(tokenizer.ordinary_ids, (B, M))
    return ids_BS, ~tokenizer.is_special_V[ids_BS]


def masked(
    masking: ClozeMasking, tokenizer: Tokenizer, rows: tuple[Ints, Bools], epoch: int = 0, step: int = 0, seed: int = 0
) -> tuple[Ints, Ints, Bools]:
    """(ids put in [B, S], targets [B, S] with -100 elsewhere, which are targets [B, S]); every token is a word."""
    new_BS, at_BK, target_BK = masking(
        *rows,
        tokenizer,
        seed=seed,
        epoch=epoch,
        step=step,
        example_ids=np.arange(len(rows[0])),
        starts_word_BS=np.ones_like(rows[1]),
    )
    target_BS = np.full(new_BS.shape, IGNORED)
    row, slot = np.nonzero(target_BK != IGNORED)
    target_BS[row, at_BK[row, slot]] = target_BK[row, slot]
    return new_BS, target_BS, target_BS != IGNORED


def within(count: int, n: int, share: float) -> None:
    """A number of successes lies within three standard errors of what n trials give."""
    error = np.sqrt(n * share * (1 - share))
    assert abs(count - n * share) < 3 * error, (count, n * share, error)


def fits(observed: npt.NDArray, expected: npt.NDArray, free: int | None = None) -> None:
    """Counts follow their expectation; classes too thin for chi-square are put together."""
    order = np.argsort(expected)[::-1]
    observed, expected = observed[order].astype(float), expected[order].astype(float)
    thin = expected < 8
    if thin.any():
        observed = np.append(observed[~thin], observed[thin].sum())
        expected = np.append(expected[~thin], expected[thin].sum())
        if expected[-1] < 8:
            observed = np.append(observed[:-2], observed[-2:].sum())
            expected = np.append(expected[:-2], expected[-2:].sum())
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert scipy.stats.chi2.sf(statistic, len(observed) - 1 if free is None else free) > LEVEL, statistic


SELECTIONS: list[Selection] = [TokenSelection(), WholeWordSelection()]


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
@pytest.mark.parametrize("rate", [0.15, 0.4])
def test_positions_are_drawn_uniformly_without_replacement(
    tokenizer: Tokenizer, rows: tuple[Ints, Bools], selection: Selection, rate: float
) -> None:
    _, _, chosen_BS = masked(ClozeMasking(selection=selection, rate=rate), tokenizer, rows)
    count = round(rate * M)
    assert (chosen_BS.sum(axis=1) == count).all()  # the rate itself has no error at all
    text_BM = chosen_BS[:, 1 : M + 1].astype(float)
    p = count / M
    # Counts of M places that share a fixed number a row: variance p (1 - p), covariance -p (1 - p) / (M - 1).
    statistic = float(((text_BM.sum(axis=0) - B * p) ** 2).sum() / (B * p * (1 - p)) * (M - 1) / M)
    assert LEVEL < scipy.stats.chi2.sf(statistic, M - 1) < 1 - LEVEL
    # Neighbours and far places are chosen together as often as two draws without replacement are.
    both = count * (count - 1) / (M * (M - 1))
    for apart in (1, 2, 63):
        pairs_B = (text_BM[:, apart:] * text_BM[:, :-apart]).sum(axis=1)
        expected = both * (M - apart)
        assert abs(pairs_B.mean() - expected) < 3 * pairs_B.std() / np.sqrt(B)


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_what_stands_in_the_place_of_a_target(
    tokenizer: Tokenizer, rows: tuple[Ints, Bools], selection: Selection
) -> None:
    masking = ClozeMasking(selection=selection)
    parts = [masked(masking, tokenizer, rows, epoch) for epoch in range(3)]
    new, target = (np.concatenate([part[k][part[2]] for part in parts]) for k in (0, 1))
    n, chance = len(target), 1 / len(tokenizer.ordinary_ids)
    is_mask, is_same = new == tokenizer.mask_id, new == target
    within(int(is_mask.sum()), n, 0.8)
    within(int((~is_mask & ~is_same).sum()), n, 0.1 * (1 - chance))
    within(int(is_same.sum()), n, 0.1 + 0.1 * chance)
    # The fate of a target has nothing to do with where it stands.
    at = np.concatenate([np.nonzero(part[2])[1] for part in parts])
    table = np.stack([np.bincount(at[is_mask], minlength=M + 1), np.bincount(at[~is_mask], minlength=M + 1)])[:, 1:]
    assert scipy.stats.chi2_contingency(table).pvalue > LEVEL


def test_random_tokens_are_uniform_over_ordinary_ids(tokenizer: Tokenizer, rows: tuple[Ints, Bools]) -> None:
    new_BS, target_BS, chosen_BS = masked(ClozeMasking(rate=1.0, corruption=[0, 1, 0]), tokenizer, rows)
    new, target = new_BS[chosen_BS], target_BS[chosen_BS]
    assert len(new) == B * M
    counts_V = np.bincount(new, minlength=tokenizer.vocab_size)
    assert counts_V[list(tokenizer.special_ids)].sum() == 0
    V = len(tokenizer.ordinary_ids)
    fits(counts_V[tokenizer.ordinary_ids], np.full(V, len(new) / V))
    # Nor does the new token know the old one, or its place.
    table = np.zeros((16, 16))
    np.add.at(table, (target % 16, new % 16), 1)
    assert scipy.stats.chi2_contingency(table).pvalue > LEVEL
    within(int((new == target).sum()), len(new), 1 / V)


@pytest.mark.parametrize("rate", [0.15, 0.5])
def test_bernoulli_counts_are_binomial(tokenizer: Tokenizer, rows: tuple[Ints, Bools], rate: float) -> None:
    masking = ClozeMasking(rate=rate, count="bernoulli")
    counts = np.concatenate([masked(masking, tokenizer, rows, epoch)[2].sum(axis=1) for epoch in range(2)])
    law = scipy.stats.binom(M, rate)
    fits(np.bincount(counts, minlength=M + 1), law.pmf(np.arange(M + 1)) * len(counts))
    n = len(counts)
    assert abs(counts.mean() - law.mean()) < 3 * law.std() / np.sqrt(n)
    # Variance of a sample variance: (fourth moment - variance^2) / n.
    fourth = law.var() ** 2 * (3 + float(law.stats(moments="k")))
    assert abs(counts.var() - law.var()) < 3 * np.sqrt((fourth - law.var() ** 2) / n)


def test_a_linear_rate_is_exact_at_every_step(tokenizer: Tokenizer, rows: tuple[Ints, Bools]) -> None:
    few = (rows[0][:64], rows[1][:64])
    masking = ClozeMasking(rate=0.4, rate_law="linear", rate_to=0.1, rate_steps=100)
    for step in (0, 1, 33, 50, 99, 100, 10_000):
        _, _, chosen_BS = masked(masking, tokenizer, few, step=step)
        rate = 0.4 - 0.3 * min(step / 100, 1)
        assert (chosen_BS.sum(axis=1) == round(rate * M)).all()


def test_a_uniform_rate_is_uniform(tokenizer: Tokenizer, rows: tuple[Ints, Bools]) -> None:
    low, high = 0.1, 0.6
    masking = ClozeMasking(rate=low, rate_law="uniform", rate_to=high)
    counts = np.concatenate([masked(masking, tokenizer, rows, epoch)[2].sum(axis=1) for epoch in range(2)])
    # A count is the rounded product: the rates from (c - 1/2) / M to (c + 1/2) / M give c.
    edges = np.clip((np.arange(M + 2) - 0.5) / M, low, high)
    fits(np.bincount(counts, minlength=M + 1), np.diff(edges) / (high - low) * len(counts))


@pytest.mark.parametrize("selection", [NgramSelection(), NgramSelection(longest=5), SpanSelection()], ids=str)
def test_runs_of_words_of_several_pieces_follow_their_law(
    tokenizer: Tokenizer, selection: NgramSelection | SpanSelection
) -> None:
    longest, words = len(selection.law), 60
    # A million words of one to three pieces; a run is counted in words, and only where the row's end cannot cut it.
    pieces = np.random.default_rng(5).integers(1, 4, (17_000, words))
    starts_BS = np.zeros((len(pieces), 3 * words), dtype=bool)
    maskable_BS = np.arange(3 * words) < pieces.sum(axis=1)[:, None]
    begin_BW = np.cumsum(pieces, axis=1) - pieces
    np.put_along_axis(starts_BS, begin_BW, True, axis=1)
    draws_BS = seeds.bits(4, "law", (), np.arange(len(pieces)), 3 * words)
    ids_BS = np.full_like(draws_BS, tokenizer.ordinary_ids[0], dtype=np.int64)
    unit_BS = selection.units(ids_BS, maskable_BS, starts_BS, tokenizer, draws_BS)
    unit_BW = np.take_along_axis(unit_BS, begin_BW, axis=1)
    begins_BW = np.diff(unit_BW, axis=1, prepend=-1) != 0
    observed = np.zeros(longest + 1, dtype=np.int64)
    for row in begins_BW:
        at = np.flatnonzero(row)
        size = np.diff(at)
        np.add.at(observed, size[at[:-1] <= words - 1 - longest], 1)
    assert observed[0] == 0
    assert observed.sum() > 200_000
    fits(observed[1:], selection.law * observed.sum())


def made_up(sizes: list[int]) -> Examples:
    """Documents of so many pairs of one-token segments, all with different texts."""
    pairs = sum(sizes)
    return Examples(
        segments=np.stack([np.arange(2 * pairs), np.arange(2 * pairs) + 1], axis=1),
        segment_document=np.repeat(np.arange(len(sizes)), 2 * np.asarray(sizes)),
        first=2 * np.arange(pairs),
        sizes=np.full(pairs, 2),
        content=np.repeat(np.arange(len(sizes), dtype=np.uint64) * np.uint64(7919), sizes),
        counts={},
        split="train",
        corpus="made up",
        paired=True,
    )


@pytest.mark.parametrize("name", ["next", "order"])
def test_labels_are_fair_and_know_neither_example_nor_epoch(name: str) -> None:
    made, epochs = made_up([20] * 1000), 60
    indices = np.arange(made.n)
    labels_EN = np.stack([pair_objective(name).draw(made, indices, 3, epoch)[2] for epoch in range(epochs)])
    assert labels_EN.size > 1e6
    within(int(labels_EN.sum()), labels_EN.size, 0.5)
    ones_E, ones_N = labels_EN.sum(axis=1), labels_EN.sum(axis=0)
    for ones, n in ((ones_E, made.n), (ones_N.reshape(200, -1).sum(axis=1), epochs * made.n // 200)):
        statistic = float(((ones - n / 2) ** 2 / (n / 4)).sum())
        assert LEVEL < scipy.stats.chi2.sf(statistic, len(ones)) < 1 - LEVEL
    fits(np.bincount(ones_N, minlength=epochs + 1), scipy.stats.binom(epochs, 0.5).pmf(np.arange(epochs + 1)) * made.n)
    # One after another: neither the next example nor the next epoch of the same one.
    for one, two in ((labels_EN[:, 1:], labels_EN[:, :-1]), (labels_EN[1:], labels_EN[:-1])):
        within(int((one == two).sum()), one.size, 0.5)
    # Another seed is another coin.
    other = np.stack([pair_objective(name).draw(made, indices, 4, epoch)[2] for epoch in range(epochs)])
    within(int((other == labels_EN).sum()), labels_EN.size, 0.5)


def seconds(made: Examples, epochs: int) -> tuple[Ints, Ints]:
    """[N] each: how often the second segment of each example stands second under label 0, and under label 1."""
    counts = np.zeros((2, made.n), dtype=np.int64)
    for epoch in range(epochs):
        _, second_N, labels_N = pair_objective("next").draw(made, np.arange(made.n), 5, epoch)
        np.add.at(counts, (labels_N, second_N // 2), 1)
    return counts[0], counts[1]


def test_second_segments_are_the_same_under_both_labels() -> None:
    documents, pairs = 100, 20
    true_N, random_N = (x.reshape(documents, pairs) for x in seconds(made_up([pairs] * documents), 500))
    assert true_N.sum() + random_N.sum() == 1_000_000
    for axis in (0, 1):  # by place in the document, by document
        table = np.stack([true_N.sum(axis=axis), random_N.sum(axis=axis)])
        assert scipy.stats.chi2_contingency(table).pvalue > LEVEL
    fits(random_N.ravel(), np.full(documents * pairs, random_N.sum() / (documents * pairs)))


def test_strangers_where_documents_are_of_unequal_length() -> None:
    sizes = np.asarray([400, 100, *[10] * 50])
    made = made_up(sizes.tolist())
    true_N, random_N = seconds(made, 1000)
    fits(true_N, np.full(made.n, true_N.sum() / made.n))
    # Every example draws alike from all that is not of its own document: the law of a stranger's document follows.
    share_D = np.asarray(
        [sum(s * size / (made.n - s) for j, s in enumerate(sizes) if j != d) for d, size in enumerate(sizes)]
    )
    assert share_D.sum() == pytest.approx(made.n)
    expected_N = np.repeat(share_D / sizes, sizes) * random_N.sum() / made.n
    fits(random_N, expected_N)


@pytest.mark.parametrize(("copies", "refresh"), [(10, 1), (4, 3)])
def test_static_copies_take_turns_evenly(
    tokenizer: Tokenizer, rows: tuple[Ints, Bools], copies: int, refresh: int
) -> None:
    few = (rows[0][:50], rows[1][:50])
    masking = ClozeMasking(copies=copies, refresh=refresh)
    epochs = 3 * copies * refresh
    new_EBS = np.stack([masked(masking, tokenizer, few, epoch)[0] for epoch in range(epochs)])
    for row in range(len(few[0])):
        _, times = np.unique(new_EBS[:, row], axis=0, return_counts=True)
        assert times.tolist() == [3 * refresh] * copies


def test_masks_do_not_know_labels_nor_other_epochs(tokenizer: Tokenizer, rows: tuple[Ints, Bools]) -> None:
    made = made_up([8] * (B // 8))
    count = round(0.15 * M)
    p = count / M
    chosen = [masked(ClozeMasking(), tokenizer, rows, epoch)[2][:, 1 : M + 1] for epoch in (0, 1)]
    for name in ("next", "order"):
        _, _, labels_B = pair_objective(name).draw(made, np.arange(B), 0, 0)
        ones = int(labels_B.sum())
        difference_M = chosen[0][labels_B == 1].mean(axis=0) - chosen[0][labels_B == 0].mean(axis=0)
        scale = p * (1 - p) * (1 / ones + 1 / (B - ones)) * M / (M - 1)
        assert LEVEL < scipy.stats.chi2.sf(float((difference_M**2).sum() / scale), M - 1) < 1 - LEVEL
    # Two epochs share as many positions as two draws of `count` out of M do: the hypergeometric law.
    shared_B = (chosen[0] & chosen[1]).sum(axis=1)
    law = scipy.stats.hypergeom(M, count, count)
    fits(np.bincount(shared_B, minlength=count + 1), law.pmf(np.arange(count + 1)) * B)
