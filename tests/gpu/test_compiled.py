"""torch.compile changes no value: the compiled model takes other paths through the code, without custom gradients."""

import os

import pytest
import torch

from tests.gpu.gpuhelp import DEVICE, FAMILIES, NEAR, NEEDS_GPU, assert_near, gradients, loss_of, make_batch, make_model

pytestmark = [pytest.mark.gpu, NEEDS_GPU]
BACKEND = os.environ.get("CLOZELAB_TEST_BACKEND", "inductor")


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_equals_eager(family: str) -> None:
    torch.compiler.reset()
    found = []
    for compiled in (False, True):
        model = make_model(FAMILIES[family], DEVICE)
        # In one graph: a break would be where the compiled step is slow.
        forward = torch.compile(model, backend=BACKEND, fullgraph=True) if compiled else model
        loss = loss_of(forward, make_batch(DEVICE))
        loss.backward()  # type: ignore[no-untyped-call]
        found.append((loss.detach(), gradients(model)))
    (eager, by_eager), (loss, by_compiled) = found
    torch.testing.assert_close(loss, eager, rtol=1e-4, atol=1e-5)
    assert_near(by_compiled, by_eager, NEAR["fp32"])
