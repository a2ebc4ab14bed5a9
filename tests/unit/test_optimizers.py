"""Parameter groups, clipping and the schedule."""

import copy

import pytest
import torch
from torch import nn

from clozelab.models.encoder import EncoderOption
from clozelab.models.initialise import initialise
from clozelab.models.positions.learned import LearnedOption
from clozelab.models.pretraining import PretrainingModel
from clozelab.training.optimizers import AdamWOption, LinearOption, gradient_norm, parameter_groups

TOY = EncoderOption(hidden=12, layers=2, heads=3, ffn=19, embedding=10, position=LearnedOption(length=9), share="all")


def test_every_trainable_parameter_is_in_one_group_and_once() -> None:
    model = PretrainingModel(TOY, 61, 0, pair=True)
    model.encoder.embeddings.position.weight.requires_grad_(False)
    decayed, plain = parameter_groups(model, 0.01)
    ids = [id(p) for p in decayed["params"] + plain["params"]]
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    assert len(ids) == len(set(ids))
    assert set(ids) == set(trainable)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.01, 0.0)
    for p in plain["params"]:
        name = trainable[id(p)]
        assert name.endswith("bias") or "norm" in name
    assert all("norm" not in trainable[id(p)] for p in decayed["params"])


@pytest.mark.parametrize("clip", [0.0, 0.05, 1e6])
def test_a_step_is_that_of_clipped_adamw(clip: float) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    other = copy.deepcopy(model)
    option = AdamWOption(lr=0.01, clip=clip)
    optimizer = option.build(model)
    reference = torch.optim.AdamW(parameter_groups(other, 0.01), lr=0.01, eps=1e-6, fused=False, foreach=False)
    for i in range(4):
        x = torch.randn(11, 5, generator=torch.Generator().manual_seed(i))
        for m in (model, other):
            m.zero_grad()
            m(x).square().sum().backward()
        norm = option.step(optimizer, model)
        expected = nn.utils.get_total_norm([p.grad for p in other.parameters() if p.grad is not None])
        torch.testing.assert_close(norm, expected)
        if clip:
            nn.utils.clip_grad_norm_(other.parameters(), clip)
        reference.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))


def test_clipping_in_place() -> None:
    model = nn.Linear(5, 7)
    model(torch.ones(1, 5)).sum().mul(100).backward()
    before = gradient_norm(model)
    torch.testing.assert_close(AdamWOption(clip=0.0).clip_gradients(model), before)
    torch.testing.assert_close(AdamWOption(clip=0.5).clip_gradients(model), before)
    torch.testing.assert_close(gradient_norm(model), torch.tensor(0.5), rtol=1e-4, atol=0)


def test_a_few_steps_learn() -> None:
    model = PretrainingModel(TOY, 61, 0)
    initialise(model, 0)
    option = AdamWOption(lr=0.02)
    optimizer = option.build(model)
    ids = torch.arange(1, 9).expand(4, 8)
    batch = {"input_ids": ids, "segment_ids": ids * 0, "attention_mask": ids > 0}
    batch |= {"target_positions": torch.tensor([[1, 5]] * 4), "target_ids": torch.tensor([[2, 6]] * 4)}
    losses = []
    for i in range(30):
        torch.manual_seed(i)
        loss = model(batch).mlm_loss / 8
        loss.backward()
        option.step(optimizer, model)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", 0.0), ("eps", 0.0), ("beta1", 1.0), ("beta2", -0.1), ("weight_decay", -1.0), ("clip", -1.0)],
)
def test_an_impossible_setting_is_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"optimizer\.{key}"):
        AdamWOption(**{key: value})


def test_the_schedule_rises_from_zero_and_falls_to_zero() -> None:
    schedule = LinearOption(warmup=0.2)
    assert [schedule.factor(p) for p in (0.0, 0.1, 0.2, 0.6, 1.0)] == pytest.approx([0, 0.5, 1, 0.5, 0])
    assert schedule.factor(1.3) == 0
    assert LinearOption(warmup=0.0).factor(0.0) == 1
    for warmup in (-0.1, 1.0):
        with pytest.raises(ValueError, match=r"schedule\.warmup"):
            LinearOption(warmup=warmup)
