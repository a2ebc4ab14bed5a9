"""Dropout on a GPU is a function of the step's seed, as `training.module` sets it."""

from dataclasses import replace

import pytest
import torch

from clozelab.seeds import stream_key
from tests.gpu.gpuhelp import BERT, DEVICE, NEEDS_GPU, loss_of, make_batch, make_model

pytestmark = [pytest.mark.gpu, NEEDS_GPU]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_seed_of_the_step_fixes_dropout(precision: str) -> None:
    model = make_model(replace(BERT, dropout=0.1, attention_dropout=0.1), DEVICE)
    batch = make_batch(DEVICE)

    def loss(step: int) -> float:
        on_gpu = DEVICE.type == "cuda"
        generator = torch.cuda.default_generators[DEVICE.index or 0] if on_gpu else torch.default_generator
        generator.manual_seed(stream_key(0, "dropout", step, 0))
        return float(loss_of(model, batch, precision).detach())

    first, second = loss(1), loss(2)
    assert first != second
    assert loss(1) == first
    assert loss(2) == second
