"""Random streams: pure, independent of their company, uniform."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from clozelab import seeds


@given(st.integers(0, 2**31), st.integers(0, 100), st.lists(st.integers(0, 2**40), min_size=2, max_size=20))
def test_a_draw_depends_on_its_index_alone(seed: int, epoch: int, indices: list[int]) -> None:
    whole = seeds.uniform(seed, "s", (epoch,), np.asarray(indices), 5)
    assert whole.shape == (len(indices), 5)
    assert ((whole >= 0) & (whole < 1)).all()
    for row, index in zip(whole, indices, strict=True):
        assert np.array_equal(seeds.uniform(seed, "s", (epoch,), np.asarray([index]), 5)[0], row)
        assert np.array_equal(seeds.uniform(seed, "s", (epoch,), np.asarray([index]), 3)[0], row[:3])


def test_keys_part_streams() -> None:
    indices = np.arange(50)
    base = seeds.bits(0, "mask", (1,), indices, 4)
    for other in (seeds.bits(1, "mask", (1,), indices, 4), seeds.bits(0, "pair", (1,), indices, 4),
                  seeds.bits(0, "mask", (2,), indices, 4), seeds.bits(0, "mask", (), indices, 4)):  # fmt: skip
        assert not np.isin(other, base).any()
    assert seeds.stream_key(1, "s", 23) != seeds.stream_key(12, "s", 3)


def test_uniform_and_uncorrelated() -> None:
    drawn = seeds.uniform(3, "s", (0,), np.arange(20_000), 4)
    assert stats.kstest(drawn.ravel(), "uniform").pvalue > 0.001
    correlation = np.corrcoef(np.concatenate([drawn.T, np.roll(drawn, 1, axis=0).T]))
    assert np.abs(correlation - np.eye(8)).max() < 4 / np.sqrt(20_000)


def test_generator_repeats() -> None:
    assert np.array_equal(seeds.rng(0, "order", 3).permutation(9), seeds.rng(0, "order", 3).permutation(9))
    assert not np.array_equal(seeds.rng(0, "order", 3).permutation(99), seeds.rng(0, "order", 4).permutation(99))


@given(st.integers(1, 3000), st.integers(0, 99))
def test_an_order_has_every_item_once(n: int, seed: int) -> None:
    order = seeds.permute(seed, "order", (0,), n, np.arange(n))
    assert np.array_equal(np.sort(order), np.arange(n))
    some = np.arange(0, n, 7)
    assert np.array_equal(seeds.permute(seed, "order", (0,), n, some), order[some])


def test_every_order_is_as_likely() -> None:
    found = [tuple(seeds.permute(seed, "order", (0,), 4, np.arange(4)).tolist()) for seed in range(6000)]
    _, counts = np.unique(found, axis=0, return_counts=True)
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-4


def test_orders_have_nothing_to_do_with_each_other_nor_with_places() -> None:
    n = 20_000
    one, two = (seeds.permute(0, "order", (epoch,), n, np.arange(n)) for epoch in (0, 1))
    for a, b in ((one, two), (one, np.arange(n)), (one[1:], one[:-1]), (one[128:], one[:-128])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(n)
