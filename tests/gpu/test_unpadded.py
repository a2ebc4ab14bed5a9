"""On a GPU as on a CPU a batch may pass without its padding, which changes no value."""

import pytest
import torch

from tests.gpu.gpuhelp import DEVICE, FAMILIES, NEAR, NEEDS_GPU, assert_near, gradients, loss_of, make_batch, make_model

pytestmark = [pytest.mark.gpu, NEEDS_GPU]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_unpadded_equals_padded(family: str, precision: str) -> None:
    found = []
    for unpad in (False, True):
        model = make_model(FAMILIES[family], DEVICE)
        model.encoder.unpad = unpad
        loss = loss_of(model, make_batch(DEVICE), precision)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append((loss.detach(), gradients(model)))
    (padded, by_padded), (unpadded, by_unpadded) = found
    torch.testing.assert_close(unpadded, padded, rtol=1e-4 if precision == "fp32" else 2e-2, atol=1e-5)
    assert_near(by_unpadded, by_padded, NEAR[precision])
