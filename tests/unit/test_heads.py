"""The heads and their losses: what is built, what is summed, and that sums add up."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clozelab.models import loss as loss_module
from clozelab.models.encoder import EncoderOption
from clozelab.models.initialise import initialise
from clozelab.models.loss import target_losses
from clozelab.models.positions.learned import LearnedOption
from clozelab.models.positions.rope import RopeOption
from clozelab.models.pretraining import PretrainingModel

V, B, S, K = 61, 6, 7, 3
TOY = EncoderOption(
    hidden=12, layers=2, heads=3, ffn=19, embedding=10, position=LearnedOption(length=9), init_scale=0.3
)


def toy(pair: bool = True, mlm: bool = True, option: EncoderOption = TOY) -> PretrainingModel:
    model = PretrainingModel(option, V, 0, mlm=mlm, pair=pair)
    initialise(model, 0)
    return model.eval()


def toy_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    target_ids = torch.randint(1, V, (B, K), generator=generator)
    target_ids[0, 2] = target_ids[4, 1] = -100
    target_ids[5] = -100
    mask = torch.ones(B, S, dtype=torch.bool)
    mask[2, 5:] = False
    return {
        "input_ids": torch.randint(1, V, (B, S), generator=generator),
        "segment_ids": (torch.arange(S) >= 4).long().expand(B, S),
        "attention_mask": mask,
        "target_positions": torch.tensor([[1, 2, 4]] * B),
        "target_ids": target_ids,
        "pair_labels": torch.tensor([0, 1, 1, 0, 1, 0]),
    }


def test_only_the_heads_of_the_task_are_built() -> None:
    assert not any(name.startswith("pair") for name in toy(pair=False).state_dict())
    assert not any(name.startswith("mlm") for name in toy(mlm=False).state_dict())
    with pytest.raises(ValueError, match="head"):
        PretrainingModel(TOY, V, 0, mlm=False, pair=False)


def test_sums_are_those_of_all_logits() -> None:
    model, batch = toy(), toy_batch()
    assert model.mlm is not None
    assert model.pair is not None
    hidden = model.encoder(batch["input_ids"], batch["segment_ids"], batch["attention_mask"])
    logits = model.mlm(hidden).gather(1, batch["target_positions"][:, :, None].expand(-1, -1, V)).flatten(0, 1)
    targets = batch["target_ids"].flatten()
    pair_logits = model.pair(hidden)
    sums = model(batch)
    torch.testing.assert_close(sums.mlm_loss, F.cross_entropy(logits, targets, reduction="sum"))
    assert sums.mlm_targets == (targets >= 0).sum() == 13
    assert sums.mlm_correct == (logits.argmax(1) == targets).sum()
    torch.testing.assert_close(sums.pair_loss, F.cross_entropy(pair_logits, batch["pair_labels"], reduction="sum"))
    assert sums.pair_rows == B
    assert sums.pair_correct == (pair_logits.argmax(1) == batch["pair_labels"]).sum()
    assert all(value.dtype == torch.float32 and value.ndim == 0 for value in sums[:6])
    assert sums[6:] == (None, None, None)


def test_sums_and_gradients_add_up_over_micro_batches() -> None:
    model, batch = toy(), toy_batch()
    whole = model(batch)
    (whole.mlm_loss + whole.pair_loss).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    parts = [model({key: value[i : i + 2] for key, value in batch.items()}) for i in (0, 2, 4)]
    for part in parts:
        (part.mlm_loss + part.pair_loss).backward()
    for total, *pieces in zip(whole[:6], *(part[:6] for part in parts), strict=True):
        torch.testing.assert_close(total, torch.stack(pieces).sum())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("slots", [0, 3])
def test_without_targets_the_loss_and_its_gradients_are_zero(slots: int, bf16: bool) -> None:
    model, batch = toy(pair=False), toy_batch()
    batch["target_ids"] = torch.full((B, slots), -100)
    batch["target_positions"] = batch["target_positions"][:, :slots]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        sums = model(batch)
    assert sums.mlm_loss == sums.mlm_targets == sums.mlm_correct == 0
    assert sums.pair_loss is None
    sums.mlm_loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool((parameter.grad == 0).all()), name


def test_scores_are_the_sums_one_by_one() -> None:
    model, batch = toy(), toy_batch()
    sums, scores = model(batch), model.scores(batch)
    assert torch.equal(scores.mlm_used_BK, batch["target_ids"] >= 0)
    assert bool((scores.mlm_loss_BK[~scores.mlm_used_BK] == 0).all())
    torch.testing.assert_close(scores.mlm_loss_BK.sum(), sums.mlm_loss)
    assert scores.mlm_correct_BK.sum() == sums.mlm_correct
    assert scores.pair_loss_B is not None
    torch.testing.assert_close(scores.pair_loss_B.sum(), sums.pair_loss)
    without = toy(mlm=False).scores(batch)
    assert not without.mlm_used_BK.any()
    assert toy(pair=False).scores(batch).pair_loss_B is None


def test_the_output_embedding_is_the_input_embedding_unless_untied() -> None:
    tied = toy()
    assert tied.mlm is not None
    assert tied.mlm.weight is tied.encoder.embeddings.token.weight
    untied = toy(option=dataclasses.replace(TOY, tie_output=False))
    assert untied.mlm is not None
    difference = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
    assert difference == V * TOY.embedding_size
    untied(toy_batch()).mlm_loss.backward()
    assert untied.mlm.weight.grad is not None


@pytest.mark.parametrize(
    ("settings", "shapes"),
    [
        ({}, {"dense.weight": (10, 12), "dense.bias": (10,), "norm.weight": (10,), "norm.bias": (10,)}),
        ({"bias": False, "activation": "geglu"}, {"dense.weight": (10, 12), "norm.weight": (10,)}),
        ({"norm": "rmsnorm"}, {"dense.weight": (10, 12), "dense.bias": (10,), "norm.weight": (10,)}),
        (
            {"tie_output": False, "output": 8, "activation": "relu"},
            {"dense.weight": (8, 12), "dense.bias": (8,), "norm.weight": (8,), "norm.bias": (8,)},
        ),
    ],
)
def test_the_head_follows_the_settings_of_the_encoder(
    settings: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    option = dataclasses.replace(TOY, **settings)
    head = toy(option=option).mlm
    assert head is not None
    # The output layer has a bias whatever the encoder has.
    shapes = shapes | {"weight": (V, option.output_width), "bias": (V,)}
    assert {name: tuple(value.shape) for name, value in head.state_dict().items()} == shapes
    act = {"geglu": F.gelu, "gelu": F.gelu, "relu": F.relu}[option.activation]
    hidden = torch.randn(5, option.hidden, generator=torch.Generator().manual_seed(0))
    expected = F.linear(head.norm(act(head.dense(hidden))), head.weight, head.bias)
    torch.testing.assert_close(head(hidden), expected)


@pytest.mark.parametrize("unpad", [False, True])
def test_a_row_of_padding_has_no_pair_and_teaches_nothing(unpad: bool) -> None:
    # Nothing tells its places from zero, which every norm would send back a huge gradient from.
    model, batch = toy(option=dataclasses.replace(TOY, layers=6, segments=0, position=RopeOption())), toy_batch()
    model.encoder.unpad = unpad
    rows = [0, 1, 2, 4, 5]
    sums = model({key: value[rows] for key, value in batch.items()})
    (sums.mlm_loss + sums.pair_loss).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    batch["attention_mask"][3] = False
    batch["input_ids"][3] = 0
    batch["target_ids"][3] = -100
    model.zero_grad(set_to_none=True)
    empty = model(batch)
    (empty.mlm_loss + empty.pair_loss).backward()
    for one, two in zip(empty, sums, strict=True):
        torch.testing.assert_close(one, two)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)
    scores = model.scores(batch)
    assert scores.pair_loss_B is not None
    assert scores.pair_correct_B is not None
    assert scores.pair_loss_B[3] == 0
    assert not scores.pair_correct_B[3]


def test_the_gradients_of_both_uses_of_the_embedding_are_added() -> None:
    batch = toy_batch()
    batch["input_ids"][3, 2] = 0  # a padding id that is looked up
    tied, untied = toy(), toy(option=dataclasses.replace(TOY, tie_output=False))
    state = tied.state_dict()
    untied.load_state_dict(state)
    tied(batch).mlm_loss.backward()
    untied(batch).mlm_loss.backward()
    assert untied.mlm is not None
    input_gradient, output_gradient = untied.encoder.embeddings.token.weight.grad, untied.mlm.weight.grad
    assert input_gradient is not None
    assert output_gradient is not None
    assert bool((input_gradient[0] == 0).all())
    torch.testing.assert_close(tied.encoder.embeddings.token.weight.grad, input_gradient + output_gradient)


def reference(h: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaves = [x.double().requires_grad_() for x in (h, weight, bias)]
    losses = F.cross_entropy(F.linear(*leaves), target, reduction="none")
    losses.mul(torch.arange(1, len(losses) + 1)).sum().backward()
    return losses.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("scale", [0.1, 1.0, 200.0])
@pytest.mark.parametrize("slice_bytes", [1 << 30, 1 << 12])
def test_losses_and_gradients_are_those_of_cross_entropy(
    scale: float, slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "_SLICE", slice_bytes)
    generator = torch.Generator().manual_seed(0)
    h, weight = torch.randn(13, 10, generator=generator) * scale, torch.randn(701, 10, generator=generator)
    bias, target = torch.randn(701, generator=generator), torch.randint(0, 701, (13,), generator=generator)
    expected, expected_gradients = reference(h, weight, bias, target)
    leaves = [x.clone().requires_grad_() for x in (h, weight, bias)]
    losses, correct = target_losses(leaves[0], leaves[1], leaves[2], target)
    losses.mul(torch.arange(1, 14)).sum().backward()
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-4 * scale)
    assert torch.equal(correct, F.linear(h, weight, bias).argmax(1) == target)
    for leaf, gradient in zip(leaves, expected_gradients, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.double(), gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()))


def test_a_confident_prediction_keeps_its_small_gradient_in_bf16() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(701, 32, generator=generator).bfloat16().float()
    target = torch.arange(16)
    h = (weight[:16] * 0.5).bfloat16().float()
    expected, expected_gradients = reference(h, weight, torch.zeros(701), target)
    assert float(expected.median()) < 0.05
    leaves = [x.clone().requires_grad_() for x in (h, weight)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses, correct = target_losses(leaves[0], leaves[1], torch.zeros(701), target)
    losses.mul(torch.arange(1, 17)).sum().backward()
    assert int(correct.sum()) >= 14
    torch.testing.assert_close(losses.double(), expected, rtol=0.05, atol=1e-4)
    for leaf, gradient in zip(leaves, expected_gradients, strict=False):
        assert leaf.grad is not None
        assert float((leaf.grad - gradient).norm() / gradient.norm()) < 0.03
