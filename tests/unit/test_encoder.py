"""The encoder: its options, shapes, invariances and initial values."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from clozelab.models.attention import _TwoProducts, attend
from clozelab.models.encoder import Encoder, EncoderOption
from clozelab.models.initialise import initialise
from clozelab.models.linear import Linear
from clozelab.models.positions.learned import LearnedOption
from clozelab.models.pretraining import PretrainingModel

V, B, S = 61, 5, 7
TOY = EncoderOption(
    hidden=12, layers=3, heads=3, ffn=19, embedding=10, position=LearnedOption(length=9), init_scale=0.3
)


def test_an_impossible_position_setting_is_refused_by_name() -> None:
    for key, value in (("length", 0), ("offset", -1)):
        with pytest.raises(ValueError, match=rf"model\.position\.{key}"):
            LearnedOption(**{key: value})


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, V, (B, S), generator=generator)
    segments = (torch.arange(S) >= 4).long().expand(B, S).clone()
    return ids, segments, torch.ones(B, S, dtype=torch.bool)


def toy(option: EncoderOption = TOY, seed: int = 0) -> Encoder:
    encoder = option.build(V, 0)
    initialise(encoder, seed)
    return encoder


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden", 0),
        ("layers", 0),
        ("heads", 5),
        ("ffn", 0),
        ("embedding", 0),
        ("segments", -1),
        ("share", "some"),
        ("activation", "relu6"),
        ("norm_eps", 0.0),
        ("dropout", 1.0),
        ("attention_dropout", -0.1),
        ("init_scale", 0.0),
    ],
)
def test_an_impossible_setting_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"model\.{key}"):
        dataclasses.replace(TOY, **{key: value})


@pytest.mark.parametrize("segments", [0, 1, 2])
@pytest.mark.parametrize("embedding", [None, 10])
def test_shapes(segments: int, embedding: int | None) -> None:
    option = dataclasses.replace(TOY, segments=segments, embedding=embedding)
    assert toy(option)(*inputs()).shape == (B, S, option.hidden)


def test_what_lies_in_padding_changes_nothing() -> None:
    encoder = toy().eval()
    ids, segments, mask = inputs()
    mask[1, 4:] = mask[3, 6:] = False
    other = torch.where(mask, ids, (ids + 17) % V)
    torch.testing.assert_close(encoder(ids, segments, mask)[mask], encoder(other, segments, mask)[mask])
    alone = encoder(ids[1:2, :4], segments[1:2, :4], mask[1:2, :4])
    torch.testing.assert_close(encoder(ids, segments, mask)[1, :4], alone[0])


@pytest.mark.parametrize("share", ["none", "all"])
@pytest.mark.parametrize("layers", [1, 3])
def test_asking_for_some_positions_gives_them_unchanged(share: str, layers: int) -> None:
    encoder = toy(dataclasses.replace(TOY, share=share, layers=layers)).eval()
    ids, segments, mask = inputs()
    mask[2, 5:] = False
    positions = torch.tensor([[0, 3, 1], [2, 2, 6], [4, 0, 0], [1, 2, 3], [6, 5, 4]])
    everywhere = encoder(ids, segments, mask)
    there = encoder(ids, segments, mask, positions)
    torch.testing.assert_close(there, everywhere.gather(1, positions[:, :, None].expand(-1, -1, TOY.hidden)))


def test_sharing_applies_one_block_as_often_as_there_are_layers() -> None:
    shared = toy(dataclasses.replace(TOY, share="all")).eval()
    assert len(shared.blocks) == 1
    unshared = toy().eval()
    for block in unshared.blocks:
        block.load_state_dict(shared.blocks[0].state_dict())
    unshared.embeddings.load_state_dict(shared.embeddings.state_dict())
    torch.testing.assert_close(shared(*inputs()), unshared(*inputs()))


def test_segments() -> None:
    ids, segments, mask = inputs()
    two, one = toy().eval(), toy(dataclasses.replace(TOY, segments=1)).eval()
    assert not torch.allclose(two(ids, segments, mask), two(ids, 1 - segments, mask))
    assert torch.equal(one(ids, segments, mask), one(ids, 1 - segments, mask))
    assert "embeddings.segment.weight" not in toy(dataclasses.replace(TOY, segments=0)).state_dict()


def test_rows_before_the_position_offset_are_unused() -> None:
    encoder = toy(dataclasses.replace(TOY, position=LearnedOption(9, offset=2))).eval()
    assert len(encoder.embeddings.position.weight) == 9 + 2
    before = encoder(*inputs())
    with torch.no_grad():
        encoder.embeddings.position.weight[:2] += 1
    assert torch.equal(before, encoder(*inputs()))


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    ids = torch.ones(1, 10, dtype=torch.long)
    with pytest.raises(ValueError, match=r"model\.position\.length >= 10"):
        toy()(ids, ids * 0, None)


def test_it_is_built_on_the_meta_device_without_memory() -> None:
    with torch.device("meta"):
        model = PretrainingModel(EncoderOption(), 30522, 0, pair=True)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    models = {pair: PretrainingModel(TOY, V, 0, pair=pair) for pair in (False, True)}
    for model in models.values():
        torch.rand(3)  # the global generator plays no part
        initialise(model, 5)
    plain, paired = (model.state_dict() for model in models.values())
    assert all(torch.equal(value, paired[name]) for name, value in plain.items())
    other = PretrainingModel(TOY, V, 0)
    initialise(other, 6)
    assert not torch.equal(other.state_dict()["mlm.dense.weight"], plain["mlm.dense.weight"])
    blocks = [plain[f"encoder.blocks.{i}.ffn.up.weight"] for i in (0, 1)]
    assert not torch.equal(blocks[0], blocks[1])


def test_initial_values_are_those_of_bert() -> None:
    model = PretrainingModel(EncoderOption(hidden=128, layers=1, heads=2, ffn=512), 1000, 3)
    initialise(model, 0)
    for name, value in model.state_dict().items():
        if "norm.weight" in name:
            assert bool((value == 1).all()), name
        elif value.ndim < 2:
            assert bool((value == 0).all()), name
        elif value.numel() > 10_000:
            assert value.abs().max() <= 0.04, name
            # The standard deviation of a normal one that is cut at two of its own.
            assert float(value.std()) == pytest.approx(0.02 * 0.8796, rel=0.02), name
    assert bool((model.encoder.embeddings.token.weight[3] == 0).all())


def test_dropout_is_a_function_of_the_seed() -> None:
    encoder = toy().train()
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(encoder(*inputs()))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_bf16_is_near_fp32() -> None:
    option = EncoderOption(hidden=64, layers=2, heads=2, ffn=128, init_scale=0.125)
    model = PretrainingModel(option, V, 0)
    initialise(model, 0)
    model.eval()
    ids, segments, mask = inputs()
    mask[2, 5:] = False
    batch = {"input_ids": ids, "segment_ids": segments, "attention_mask": mask}
    batch |= {"target_positions": torch.tensor([[1, 3]] * B), "target_ids": torch.randint(1, V, (B, 2))}
    gradients = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = model(batch).mlm_loss
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, expected in gradients[0].items():
        assert gradients[1][name].dtype == torch.float32
        # Keys have no gradient through their bias: the softmax does not see it.
        if "qkv.bias" not in name:
            error = (gradients[1][name] - expected).norm() / expected.norm()
            assert error < 0.05, (name, error)


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("bias_shape", [None, (B, 1, 1, S), (1, 6, 4, S), (B, 6, 4, S)])
def test_both_ways_of_attention_agree(kv_heads: int, bias_shape: tuple[int, ...] | None) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v = draw(B, 6, 4, 5), draw(B, kv_heads, S, 5), draw(B, kv_heads, S, 5)
    bias = None if bias_shape is None else draw(*bias_shape)
    flash = attend(q, k, v, bias, 0.0)
    ours = _TwoProducts.apply(q, k, v, bias, 0.0)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(ours, flash)
    weights = torch.randn(flash.shape, generator=generator, dtype=torch.float64)
    leaves = [x for x in (q, k, v, bias) if x is not None]
    for a, b in zip(
        torch.autograd.grad((ours * weights).sum(), leaves),
        torch.autograd.grad((flash * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_the_linear_layer_in_bf16_is_that_of_torch() -> None:
    ours, theirs = Linear(24, 40), torch.nn.Linear(24, 40)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 5, 24)
    results = []
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(leaf)
        y.float().square().sum().backward()
        results.append((y, leaf.grad, layer.weight.grad, layer.bias.grad))
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
