import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clozelab.claims import stats

scipy_stats = pytest.importorskip("scipy.stats")

X = [0.31, -0.12, 0.45, 0.27, 0.09, 0.52, 0.13]
floats = st.floats(-10, 10, allow_nan=False).map(lambda value: round(value, 3))
samples = st.lists(floats, min_size=2, max_size=8).filter(lambda x: np.ptp(x) > 0.01)


@given(samples, floats, st.sampled_from(["two-sided", "greater", "less"]))
def test_t_test_is_scipys(x, null, alternative):
    ours = stats.t_test(x, null, alternative)
    assert ours == pytest.approx(scipy_stats.ttest_1samp(x, null, alternative=alternative).pvalue, rel=1e-6, abs=1e-12)


@given(samples)
def test_t_interval_is_scipys_and_agrees_with_the_test(x):
    ours, theirs = stats.t_interval(x), scipy_stats.ttest_1samp(x, 0).confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-6, abs=1e-9)
    assert stats.t_test(x, ours.low) == pytest.approx(0.05, rel=1e-5)


@given(st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=7))
def test_sign_flip_is_brute_force_over_all_signs(x):
    sums = [sum(s * v for s, v in zip(signs, x, strict=True)) for signs in itertools.product([1, -1], repeat=len(x))]
    observed = sum(x)
    assert stats.sign_flip(x, alternative="greater") == sum(s >= observed for s in sums) / len(sums)
    assert stats.sign_flip(x, alternative="less") == sum(s <= observed for s in sums) / len(sums)
    assert stats.sign_flip(x) == sum(abs(s) >= abs(observed) for s in sums) / len(sums)


def test_sign_flip_is_scipys_permutation_test():
    theirs = scipy_stats.permutation_test((np.array(X),), np.sum, permutation_type="samples", n_resamples=np.inf)
    assert stats.sign_flip(X) == pytest.approx(theirs.pvalue)


@pytest.mark.parametrize(
    ("n", "one", "two"), [(1, 0.5, 1.0), (3, 0.125, 0.25), (5, 0.03125, 0.0625), (8, 1 / 256, 1 / 128)]
)
def test_the_floor_of_the_sign_flip_test_is_reached_and_not_passed(n, one, two):
    x = [0.2] * n  # ten pairs, each exactly 0.2 better, must look as good as they can (an unpaired test says p = 0.32)
    assert stats.sign_flip(x, alternative="greater") == stats.sign_flip_floor(n, "greater") == one
    assert stats.sign_flip(x) == stats.sign_flip_floor(n) == two


def test_too_many_seeds_for_the_exact_test_are_refused():
    assert 0 < stats.sign_flip(np.linspace(-1, 2, 20)) < 1
    with pytest.raises(ValueError, match="21 seeds"):
        stats.sign_flip([1.0] * 21)


def test_values_that_do_not_vary_get_the_exact_p_in_place_of_zero():
    assert stats.t_test([0.1] * 5) == 0.0625
    assert stats.t_test([0.1 + 0.2, 0.3, 0.3]) == 0.25  # equal but for rounding
    assert stats.t_test([0.0, 0.0, 0.0]) == 1.0
    interval = stats.t_interval([0.1] * 5)
    assert interval.low == interval.high == pytest.approx(0.1)


@given(samples, st.floats(0.01, 5))
def test_tost_is_two_one_sided_tests_and_the_90_percent_interval(x, margin):
    lower = scipy_stats.ttest_1samp(x, -margin, alternative="greater").pvalue
    upper = scipy_stats.ttest_1samp(x, margin, alternative="less").pvalue
    p = stats.tost(x, margin)
    assert p == pytest.approx(max(lower, upper), rel=1e-6, abs=1e-12)
    if abs(p - 0.05) > 1e-6:
        interval = stats.t_interval(x, 0.90)
        assert (p < 0.05) == (-margin < interval.low and interval.high < margin)


@given(samples, st.floats(0.01, 5))
def test_outside_is_the_95_percent_interval_beyond_a_margin(x, margin):
    p, interval = stats.outside(x, margin), stats.t_interval(x)
    if abs(p - 0.05) > 1e-6:
        assert (p < 0.05) == (interval.low > margin or interval.high < -margin)


def test_a_margin_must_be_positive():
    with pytest.raises(ValueError, match="above 0"):
        stats.tost(X, 0.0)


def test_holm_by_hand():
    # 4 tests: 0.01*4, 0.015*3, 0.03*2, 0.04*1, each at least the one before
    assert stats.holm([0.04, 0.01, 0.03, 0.015]) == pytest.approx([0.06, 0.04, 0.06, 0.045])
    assert stats.holm([0.5, 0.6]) == [1.0, 1.0]
    assert stats.holm([]) == []


def test_holm_counts_a_test_that_could_not_be_made():
    assert stats.holm([0.01, None, 0.04]) == [pytest.approx(0.03), None, pytest.approx(0.08)]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_the_raw_p_and_bonferroni_and_keeps_the_order(p):
    adjusted = stats.holm(p)
    assert all(raw <= a <= min(1, raw * len(p)) + 1e-12 for raw, a in zip(p, adjusted, strict=True))
    assert [a for _, a in sorted(zip(p, adjusted, strict=True))] == sorted(adjusted)


@pytest.mark.parametrize("n", [3, 5, 8, 20])
@pytest.mark.parametrize("alpha", [0.05, 0.05 / 8])
def test_smallest_effect_has_the_power_it_promises(n, alpha):
    effect = stats.smallest_effect(n, 2.0, alpha)
    critical = scipy_stats.t.ppf(1 - alpha / 2, n - 1)
    assert scipy_stats.nct.sf(critical, n - 1, effect / 2.0 * math.sqrt(n)) == pytest.approx(0.8, abs=1e-4)


def test_smallest_effect_of_the_published_power_table():
    # one-sided at 0.05 is two-sided at 0.10: n = 8 finds one sd with power 0.82, n = 5 with 0.58
    assert stats.smallest_effect(8, 1.0, 0.10, 0.82) == pytest.approx(1.0, abs=0.02)
    assert stats.smallest_effect(5, 1.0, 0.10, 0.58) == pytest.approx(1.0, abs=0.02)
    assert stats.smallest_effect(1, 1.0) is None


def test_the_t_interval_covers_95_percent_at_five_seeds_and_the_percentile_bootstrap_does_not():
    rng = np.random.default_rng(0)
    x = rng.normal(0.3, 1.0, (4000, 5))
    half = scipy_stats.t.ppf(0.975, 4) * x.std(axis=1, ddof=1) / math.sqrt(5)
    assert stats.t_interval(x[0]).high - x[0].mean() == pytest.approx(half[0])
    assert np.mean(np.abs(x.mean(axis=1) - 0.3) <= half) == pytest.approx(0.95, abs=0.012)
    covered = 0
    for row in x[:400]:
        interval = stats.two_level_bootstrap(row[:, None], 0.0, draws=500)
        covered += interval.low <= 0.3 <= interval.high
    assert 0.76 <= covered / 400 <= 0.90


def test_sign_flip_and_holm_hold_their_error_rates():
    rng = np.random.default_rng(1)
    p = [[stats.t_test(rng.normal(0, 1, 5)) for _ in range(4)] for _ in range(1500)]
    family = np.mean([min(stats.holm(row)) <= 0.05 for row in p])
    assert family <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1500)
    flips = np.mean([stats.sign_flip(rng.normal(0, 1, 6), alternative="greater") <= 0.05 for _ in range(1500)])
    assert flips <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1500)


# The two-level bootstrap ---------------------------------------------------------------------------------------------


def test_bootstrap_is_paired_at_both_levels():
    rng = np.random.default_rng(2)
    shared = rng.normal(0, 5, (4, 1)) + rng.normal(0, 5, (1, 90))
    interval = stats.two_level_bootstrap(shared + 0.2, shared)
    assert (interval.low, interval.high) == pytest.approx((0.2, 0.2))


def test_bootstrap_width_is_that_of_the_two_sources_of_variance():
    rng = np.random.default_rng(3)
    seeds, examples = 40, 500
    seed_part, example_part = rng.normal(0, 0.1, (seeds, 1)), rng.normal(0, 3.0, (1, examples))
    left = 1.0 + seed_part + example_part
    interval = stats.two_level_bootstrap(left, 0.0, draws=4000)
    expected = math.sqrt(seed_part.std() ** 2 / seeds + example_part.std() ** 2 / examples)
    assert (interval.high - interval.low) / (2 * 1.96) == pytest.approx(expected, rel=0.06)
    assert interval.mean == pytest.approx(left.mean())


def test_bootstrap_of_a_ratio_weighs_examples_by_their_targets():
    sums = np.array([[10.0, 0.0, 4.0], [12.0, 1.0, 5.0]])
    weights = np.array([[10.0, 1.0, 2.0], [10.0, 1.0, 2.0]])
    interval = stats.two_level_bootstrap(np.stack([sums, weights], -1), 0.5, draws=50)
    assert interval.mean == pytest.approx(np.mean([14 / 13, 18 / 13]) - 0.5)


def test_bootstrap_obeys_its_seed_and_no_global_one():
    left, right = np.random.default_rng(4).normal(size=(2, 3, 50))
    np.random.seed(1)  # noqa: NPY002  the trap: a helper that draws from the global generator
    first = stats.two_level_bootstrap(left, right, seed=7)
    np.random.seed(2)  # noqa: NPY002
    assert stats.two_level_bootstrap(left, right, seed=7) == first
    assert stats.two_level_bootstrap(left, right, seed=8) != first


def test_bootstrap_refuses_scores_that_cannot_be_paired():
    with pytest.raises(ValueError, match="one shape"):
        stats.two_level_bootstrap(np.zeros((3, 5)), np.zeros((3, 6)))
    with pytest.raises(ValueError, match="seeds, examples"):
        stats.two_level_bootstrap(np.zeros(3), 0.0)


@pytest.mark.parametrize("x", [[], [1.0], [1.0, math.nan], [[1.0, 2.0]]])
def test_what_is_no_sample_is_refused(x):
    with pytest.raises(ValueError, match=r"values"):
        stats.t_test(x)
