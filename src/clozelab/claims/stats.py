"""Statistics for few paired seeds. Pure functions of arrays; no state, no global generator.

`x` is always one number a seed: the difference between two arms trained with that seed (or a value minus a constant).
Differences of paired runs are what is analysed, never two separate samples: seeds share data order and initial values,
which removes most of their variance.

Only `scipy.special` is imported: it holds the distributions and costs a fifth of `scipy.stats`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Alternative = Literal["two-sided", "greater", "less"]
Values = Sequence[float] | npt.NDArray[np.float64]

EXACT_LIMIT = 20
"""Most seeds for which all 2^n sign flips are enumerated (2^20 sums are 8 MB)."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """A two-sided interval for a mean."""

    mean: float
    sd: float
    """Sample standard deviation (n - 1)."""
    n: int
    low: float
    high: float
    level: float


def _sample(x: Values, least: int = 2) -> npt.NDArray[np.float64]:
    values = np.asarray(x, dtype=np.float64)
    if values.ndim != 1 or len(values) < least:
        raise ValueError(f"needs a list of at least {least} values, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError("values must be finite; a diverged seed is handled by the verdict, not by a mean")
    return values


def constant(x: Values) -> bool:
    """Whether the values do not vary beyond rounding, so that a t statistic has no meaning."""
    values = np.asarray(x, dtype=np.float64)
    return bool(np.ptp(values) <= 1e-12 * max(1e-300, float(np.abs(values).max())))


def mean_sd(x: Values) -> tuple[float, float]:
    """Mean and sample standard deviation (nan for a single value)."""
    values = _sample(x, least=1)
    return float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else math.nan


def t_interval(x: Values, level: float = 0.95) -> Interval:
    """Student's t interval for the mean of paired differences; exact for normal differences at any n."""
    from scipy.special import stdtrit

    values = _sample(x)
    mean, sd = mean_sd(values)
    if constant(values):
        return Interval(mean, 0.0, len(values), mean, mean, level)
    half = float(stdtrit(len(values) - 1, (1 + level) / 2)) * sd / math.sqrt(len(values))
    return Interval(mean, sd, len(values), mean - half, mean + half, level)


def t_test(x: Values, null: float = 0.0, alternative: Alternative = "two-sided") -> float:
    """p of Student's one-sample t test that the mean is `null`; on differences it is the paired t test.

    Where the values do not vary at all (accuracies that move in steps can do that) t would be infinite and p zero, on
    any number of seeds. The exact sign-flip p stands in: it needs no variance and cannot fall below its floor.
    """
    from scipy.special import stdtr

    values = _sample(x) - null
    if constant(np.asarray(x, dtype=np.float64)):
        return sign_flip(values, alternative=alternative)
    t = float(values.mean() / (values.std(ddof=1) / math.sqrt(len(values))))
    df = len(values) - 1
    if alternative == "greater":
        return float(stdtr(df, -t))
    if alternative == "less":
        return float(stdtr(df, t))
    return float(min(1.0, 2 * stdtr(df, -abs(t))))


def sign_flip(x: Values, null: float = 0.0, alternative: Alternative = "two-sided") -> float:
    """p of the exact sign-flip (Fisher randomisation) test: were the signs of the differences a matter of chance?

    All 2^n assignments of signs are enumerated, so p is exact under symmetry alone and never below
    `sign_flip_floor(n)`. Fisher (1935), The Design of Experiments, section 21.

    Raises:
        ValueError: more than `EXACT_LIMIT` values.
    """
    values = _sample(x, least=1) - null
    if len(values) > EXACT_LIMIT:
        raise ValueError(f"{len(values)} seeds make 2^{len(values)} sign flips; the exact test takes {EXACT_LIMIT}")
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    observed, slack = float(values.sum()), 1e-12 * float(np.abs(values).sum())
    if alternative == "greater":
        extreme = sums >= observed - slack
    elif alternative == "less":
        extreme = sums <= observed + slack
    else:
        extreme = np.abs(sums) >= abs(observed) - slack
    return float(extreme.mean())


def sign_flip_floor(n: int, alternative: Alternative = "two-sided") -> float:
    """The smallest p that n seeds can reach in the sign-flip test."""
    return min(1.0, (2.0 if alternative == "two-sided" else 1.0) / 2.0**n)


def tost(x: Values, margin: float) -> float:
    """p of two one-sided t tests: is the mean inside (-margin, margin)? Schuirmann (1987).

    p <= alpha is the same as the (1 - 2 alpha) t interval lying inside the margins.
    """
    if margin <= 0:
        raise ValueError(f"an equivalence margin is above 0, got {margin}")
    return max(t_test(x, -margin, "greater"), t_test(x, margin, "less"))


def outside(x: Values, margin: float) -> float:
    """Two-sided p that the mean is *outside* (-margin, margin), on the side where it was observed.

    p <= alpha is the same as the (1 - alpha) t interval lying wholly beyond one of the margins.
    """
    nearer = margin if float(np.mean(np.asarray(x))) > 0 else -margin
    return min(1.0, 2 * t_test(x, nearer, "greater" if nearer > 0 else "less"))


def holm(p: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjusted p values, in the order given. Holm (1979), Scand. J. Statist. 6.

    A test that could not be made (None) stays None and still counts: leaving a prediction out must not make the
    others easier.
    """
    order = sorted((i for i, value in enumerate(p) if value is not None), key=lambda i: (p[i], i))
    adjusted: list[float | None] = [None] * len(p)
    running = 0.0
    for rank, index in enumerate(order):
        value = p[index]
        assert value is not None
        running = max(running, min(1.0, (len(p) - rank) * value))
        adjusted[index] = running
    return adjusted


def smallest_effect(n: int, sd: float, alpha: float = 0.05, power: float = 0.8) -> float | None:
    """The smallest true mean that a two-sided paired t test of n seeds finds with the given power, in the unit of sd.

    Solves the noncentral t distribution for its noncentrality (the other tail, below 1e-6, is left out). None where it
    cannot be computed (n < 2).
    """
    from scipy.special import nctdtrinc, stdtrit

    if n < 2 or not math.isfinite(sd):
        return None
    critical = float(stdtrit(n - 1, 1 - alpha / 2))
    noncentrality = float(nctdtrinc(n - 1, 1 - power, critical))
    return noncentrality * sd / math.sqrt(n) if math.isfinite(noncentrality) else None


def two_level_bootstrap(
    left: npt.NDArray[Any], right: npt.NDArray[Any] | float, *, draws: int = 2000, level: float = 0.95, seed: int = 0
) -> Interval:
    """Interval for left - right when both the seeds and the evaluation examples are samples.

    Seeds are resampled in pairs (the same seeds of both arms); examples are resampled once per draw and used for all
    seeds and both arms, since the yardstick shows everyone the same examples. This is the multi-bootstrap of Sellam
    et al. (2022), arXiv 2106.16163, with its own generator.

    It is a *percentile* interval: with few seeds it is too narrow (see docs/statistics.md for the coverage), so it is
    shown as a check on whether the examples matter, and never decides.

    Args:
        left: [S, N] one value per seed and example, or [S, N, 2] sums and weights where the metric is a ratio of
            totals.
        right: the other arm in the same shape and order, or a constant.
    """
    one = _totals(left)
    other = None if isinstance(right, float | int) else _totals(right)
    if other is not None and other.shape != one.shape:
        raise ValueError(f"paired scores must have one shape, got {left.shape} and {np.shape(right)}")
    generator = np.random.Generator(np.random.Philox(key=seed))
    seeds, examples = one.shape[:2]
    means = np.empty(draws)
    chunk = max(1, 4_000_000 // examples)
    for start in range(0, draws, chunk):
        size = min(chunk, draws - start)
        counts = generator.multinomial(examples, np.full(examples, 1 / examples), size=size).astype(np.float64)
        per_seed = _ratio(counts, one) - (float(right) if other is None else _ratio(counts, other))  # type: ignore[arg-type]
        picks = generator.multinomial(seeds, np.full(seeds, 1 / seeds), size=size)
        means[start : start + size] = (picks * per_seed).sum(axis=1) / seeds
    ones = np.ones((1, examples))
    observed = (_ratio(ones, one) - (float(right) if other is None else _ratio(ones, other)))[0]  # type: ignore[arg-type]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    sd = float(observed.std(ddof=1)) if seeds > 1 else math.nan
    return Interval(float(observed.mean()), sd, seeds, float(low), float(high), level)


def _totals(scores: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """[S, N, 2]: sums and weights."""
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim == 2:
        values = np.stack([values, np.ones_like(values)], axis=-1)
    if values.ndim != 3 or values.shape[-1] != 2:
        raise ValueError(f"scores are [seeds, examples] or [seeds, examples, 2], got {values.shape}")
    return values


def _ratio(counts: npt.NDArray[np.float64], totals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[draws, S]: the metric of every seed on the resampled examples."""
    return (counts @ totals[..., 0].T) / (counts @ totals[..., 1].T)
