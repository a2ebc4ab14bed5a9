"""Dropout from random bytes: unbiased, as often as it says, and a function of torch's seed."""

import pytest
import torch
from torch import Tensor

from clozelab.models.attention import _TwoProducts
from clozelab.models.dropout import add_dropped, dropout, keep_mask, random_bytes, rounded_rate


def test_bytes_are_uniform_and_independent_of_their_neighbours() -> None:
    torch.manual_seed(0)
    n = 1 << 20
    values = random_bytes(n).long()
    expected = n / 256
    chi_square = float(((torch.bincount(values, minlength=256) - expected) ** 2 / expected).sum())
    assert 255 - 5 * 22.6 < chi_square < 255 + 5 * 22.6
    # Lags within a word, across words, and across a row of 128.
    kept = (values >= 26).double()
    for lag in (1, 7, 8, 9, 64, 128, 1024):
        correlation = torch.corrcoef(torch.stack([kept[:-lag], kept[lag:]]))[0, 1]
        assert abs(float(correlation)) < 5 / n**0.5, lag


def test_masks_of_successive_draws_are_unrelated() -> None:
    torch.manual_seed(0)
    masks = torch.stack([keep_mask((1 << 18,), 0.1, torch.float32) for _ in range(4)])
    correlation = torch.corrcoef(masks) - torch.eye(4)
    assert float(correlation.abs().max()) < 5 / 2**9


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1001])
def test_any_number_of_bytes(n: int) -> None:
    assert random_bytes(n).shape == (n,)


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rate_is_rounded_and_the_mean_is_kept(rate: float, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    n = 1 << 20
    k, scale = rounded_rate(rate)
    assert abs(k / 256 - rate) <= 1 / 512
    assert (1 - k / 256) * scale == 1
    y = dropout(torch.ones(n, dtype=dtype), rate, training=True).double()
    dropped = float((y == 0).double().mean())
    assert dropped == pytest.approx(k / 256, abs=5 * (k / 256 * (1 - k / 256) / n) ** 0.5)
    tolerance = 5 * (scale - 1) ** 0.5 / n**0.5 + (2**-8 if dtype == torch.bfloat16 else 0)
    assert float(y.mean()) == pytest.approx(1, abs=tolerance)


def test_outside_training_and_at_rate_zero_nothing_happens() -> None:
    x, residual = torch.randn(5, 7), torch.randn(5, 7)
    assert torch.equal(dropout(x, 0.5, training=False), x)
    assert torch.equal(dropout(x, 0.0, training=True), x)
    assert torch.equal(add_dropped(residual, x, 0.5, training=False), residual + x)
    assert torch.equal(add_dropped(residual, x, 0.001, training=True), residual + x)


def test_gradients_see_the_mask_of_the_forward_pass() -> None:
    x, residual = torch.randn(50, 70, requires_grad=True), torch.randn(50, 70, requires_grad=True)
    _, scale = rounded_rate(0.3)
    torch.manual_seed(2)
    y = dropout(x, 0.3, training=True)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.unique().tolist() == pytest.approx([0.0, scale])
    torch.testing.assert_close(y, x * dx)
    torch.manual_seed(2)
    total = add_dropped(residual, x, 0.3, training=True)
    torch.testing.assert_close(total, residual + y)
    dresidual, dx_again = torch.autograd.grad(total.sum(), (residual, x))
    assert bool((dresidual == 1).all())
    torch.testing.assert_close(dx_again, dx)


def test_the_seed_decides() -> None:
    draws = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        draws.append(torch.cat([random_bytes(100), random_bytes(100)]))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0][:100], draws[0][100:])


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_drops_weights_after_the_softmax(kv_heads: int) -> None:
    b, s, heads, width = 3, 7, 4, 5
    generator = torch.Generator().manual_seed(0)

    def draw(n: int) -> Tensor:
        return torch.randn(b, n, s, width, generator=generator, dtype=torch.float64).requires_grad_()

    leaves = q, k, v = draw(heads), draw(kv_heads), draw(kv_heads)
    torch.manual_seed(6)
    ours = _TwoProducts.apply(q, k, v, None, 0.25)  # type: ignore[no-untyped-call]
    torch.manual_seed(6)
    keep = keep_mask((b * heads, s, s), 0.25, torch.float64).unflatten(0, (b, heads))
    k_all, v_all = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    weights = torch.softmax(q @ k_all.mT / width**0.5, -1) * keep * rounded_rate(0.25)[1]
    expected = weights @ v_all
    torch.testing.assert_close(ours, expected)
    probe = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    for a, e in zip(
        torch.autograd.grad((ours * probe).sum(), leaves),
        torch.autograd.grad((expected * probe).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, e)
