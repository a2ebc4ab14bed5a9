"""Tiny encoders of three families, a batch with padding, and a training step on a device.

CLOZELAB_TEST_DEVICE=cpu tries the tests themselves where there is no GPU.
"""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clozelab.models.encoder import EncoderOption
from clozelab.models.initialise import initialise
from clozelab.models.positions.learned import LearnedOption
from clozelab.models.positions.rope import RopeOption
from clozelab.models.pretraining import PretrainingModel
from clozelab.training.optimizers import AdamWOption
from clozelab.training.precision import autocast

DEVICE = torch.device(os.environ.get("CLOZELAB_TEST_DEVICE", "cuda"))
NEEDS_GPU = pytest.mark.skipif(
    DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"
)

VOCAB, PAD, ROWS, LENGTH, TARGETS = 97, 0, 6, 32, 5

BERT = EncoderOption(
    hidden=64, layers=2, heads=2, ffn=128, position=LearnedOption(length=LENGTH), dropout=0.0, attention_dropout=0.0
)
FAMILIES = {
    "bert": BERT,
    "albert": EncoderOption(
        hidden=64,
        layers=3,
        heads=2,
        ffn=128,
        embedding=32,
        share="all",
        activation="gelu_new",
        position=LearnedOption(length=LENGTH),
        dropout=0.0,
        attention_dropout=0.0,
    ),
    "modernbert": EncoderOption(
        hidden=64,
        layers=4,
        heads=2,
        ffn=128,
        activation="geglu",
        norm_place="pre",
        first_norm=False,
        bias=False,
        window=8,
        position=RopeOption(theta=160_000.0, local_theta=10_000.0),
        dropout=0.0,
        attention_dropout=0.0,
    ),
}


# Largest distance of gradients, relative to their norm: a GPU may multiply fp32 with tf32's rounding inside attention.
NEAR = {"fp32": 1e-3, "bf16": 1e-1}


def make_model(option: EncoderOption, device: torch.device, seed: int = 0) -> PretrainingModel:
    """With both heads; the same values on every device."""
    model = PretrainingModel(option, VOCAB, PAD, pair=True)
    initialise(model, seed)
    return model.to(device).train()


def make_batch(device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Rows of different lengths, some with fewer targets than slots."""
    generator = torch.Generator().manual_seed(seed)
    length_B = torch.tensor([LENGTH, 9, 20, LENGTH, 14, 27])
    mask_BS = torch.arange(LENGTH) < length_B[:, None]
    ids_BS = torch.randint(5, VOCAB, (ROWS, LENGTH), generator=generator).where(mask_BS, PAD)
    place_BK = torch.stack(
        [torch.randperm(int(length), generator=generator)[:TARGETS].sort()[0] for length in length_B]
    )
    target_BK = ids_BS.gather(1, place_BK)
    target_BK[1, 3:] = -100
    batch = {
        "input_ids": ids_BS.scatter(1, place_BK, 3),
        "segment_ids": (torch.arange(LENGTH) >= length_B[:, None] // 2).long().where(mask_BS, 0),
        "attention_mask": mask_BS,
        "target_positions": place_BK,
        "target_ids": target_BK,
        "pair_labels": torch.randint(0, 2, (ROWS,), generator=generator),
    }
    return {key: value.to(device) for key, value in batch.items()}


def loss_of(forward: Callable[..., object], batch: dict[str, Tensor], precision: str = "fp32") -> Tensor:
    """The loss of a step, as `training.module` makes it."""
    with autocast(precision, batch["input_ids"].device.type):
        sums = forward(batch)
    loss: Tensor = sums.mlm_loss / sums.mlm_targets + sums.pair_loss / sums.pair_rows  # type: ignore[attr-defined]
    return loss


def gradients(model: PretrainingModel) -> dict[str, Tensor]:
    """On the CPU, by name."""
    return {name: p.grad.detach().cpu().clone() for name, p in model.named_parameters() if p.grad is not None}


def train(model: PretrainingModel, device: torch.device, steps: int, precision: str = "fp32") -> list[float]:
    """The losses of some steps."""
    option = AdamWOption(lr=1e-3)
    optimizer = option.build(model)
    losses = []
    for number in range(steps):
        loss = loss_of(model, make_batch(device, seed=number), precision)
        loss.backward()  # type: ignore[no-untyped-call]
        option.step(optimizer, model)
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return losses


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Every gradient lies within a share of its norm."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        distance = float((found[name] - value).norm() / value.norm().clamp(min=1e-6))
        assert distance < tolerance, f"{name} is {distance:.2g} of its norm off"
