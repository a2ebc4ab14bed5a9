"""A training step on a GPU is the step of the CPU, the reference: other kernels, the same numbers."""

import math

import pytest
import torch

from tests.gpu.gpuhelp import (
    DEVICE,
    FAMILIES,
    NEAR,
    NEEDS_GPU,
    assert_near,
    gradients,
    loss_of,
    make_batch,
    make_model,
    train,
)

pytestmark = [pytest.mark.gpu, NEEDS_GPU]
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_cpu(family: str) -> None:
    found = {}
    for device in (CPU, DEVICE):
        model = make_model(FAMILIES[family], device)
        loss = loss_of(model, make_batch(device))
        loss.backward()  # type: ignore[no-untyped-call]
        found[device.type] = (loss.detach().cpu(), gradients(model))
    (loss_cpu, on_cpu), (loss_gpu, on_gpu) = found["cpu"], found[DEVICE.type]
    torch.testing.assert_close(loss_gpu, loss_cpu, rtol=1e-4, atol=1e-5)
    assert_near(on_gpu, on_cpu, NEAR["fp32"])


@pytest.mark.parametrize("family", FAMILIES)
def test_some_steps_of_the_optimizer_are_those_of_the_cpu(family: str) -> None:
    # Clipping and update of the fused kernel included. Adam turns rounding of small gradients into whole steps, hence
    # the losses, to a thousandth, and not the weights.
    losses = {device: train(make_model(FAMILIES[family], device), device, steps=6) for device in (CPU, DEVICE)}
    assert losses[DEVICE] == pytest.approx(losses[CPU], rel=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_finite_and_near_fp32(family: str) -> None:
    model = make_model(FAMILIES[family], DEVICE)
    exact = loss_of(model, make_batch(DEVICE)).detach()
    loss = loss_of(model, make_batch(DEVICE), "bf16")
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == pytest.approx(float(exact), rel=2e-2)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(model).values())
    assert all(gradient.dtype == torch.float32 for gradient in gradients(model).values())
    losses = train(model, DEVICE, steps=6, precision="bf16")
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_for_evaluation_are_those_of_the_cpu(family: str) -> None:
    scores = [make_model(FAMILIES[family], device).eval().scores(make_batch(device)) for device in (CPU, DEVICE)]
    for expected, value in zip(*scores, strict=True):
        torch.testing.assert_close(value.cpu(), expected, rtol=1e-4, atol=1e-5)
