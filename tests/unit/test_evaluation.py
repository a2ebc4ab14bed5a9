"""The linear probe and its pooling, against closed forms and SciPy."""

import numpy as np
import pytest
import scipy.optimize
import torch

from clozelab.evaluation.sentence_pairs import fit_logistic, pool


def test_pool_leaves_padding_out_and_keeps_the_segments_apart() -> None:
    hidden_BSH = torch.arange(2 * 6 * 3, dtype=torch.float32).view(2, 6, 3)
    segments_BS = torch.tensor([[0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 1, 1]])
    attention_BS = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    got = pool(hidden_BSH, segments_BS, attention_BS)
    assert got.shape == (2, 9)
    torch.testing.assert_close(got[0, :3], hidden_BSH[0, 0].double())
    torch.testing.assert_close(got[0, 3:6], hidden_BSH[0, :3].mean(0).double())
    torch.testing.assert_close(got[0, 6:], hidden_BSH[0, 3:5].mean(0).double())
    torch.testing.assert_close(got[1, 6:], hidden_BSH[1, 2:].mean(0).double())


def test_probe_agrees_with_scipy() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 5)) * [1, 10, 0.1, 1, 1] + 3
    y = (x @ [1, 0.1, 5, -1, 0] + rng.normal(size=400) > 3.5).astype(int)
    predict = fit_logistic(torch.tensor(x), torch.tensor(y), l2=0.01)
    z = (x - x.mean(0)) / x.std(0, ddof=1)

    def loss(w: np.ndarray) -> float:
        return float(np.logaddexp(0, -(2 * y - 1) * (z @ w[:5] + w[5])).mean() + 0.005 * w[:5] @ w[:5])

    best = scipy.optimize.minimize(loss, np.zeros(6), method="BFGS").x
    assert (predict(torch.tensor(x)).numpy() == (z @ best[:5] + best[5] > 0)).mean() >= 0.995


def test_probe_finds_what_is_there_and_only_that() -> None:
    generator = torch.Generator().manual_seed(0)
    train, test = (torch.randn(2000, 20, generator=generator, dtype=torch.float64) for _ in range(2))
    labels = [(x[:, 3] > 0).long() for x in (train, test)]
    assert (fit_logistic(train, labels[0], 1e-2)(test) == labels[1]).double().mean() > 0.97
    coin = torch.randint(0, 2, (2000,), generator=generator)
    assert abs((fit_logistic(train, coin, 1e-2)(test) == labels[1]).double().mean() - 0.5) < 0.2


def test_a_constant_feature_does_no_harm() -> None:
    x = torch.cat([torch.randn(100, 1, dtype=torch.float64), torch.ones(100, 1, dtype=torch.float64)], 1)
    y = (x[:, 0] > 0).long()
    assert (fit_logistic(x, y, 1e-3)(x) == y).double().mean() == pytest.approx(1.0, abs=0.03)
