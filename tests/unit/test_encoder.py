"""The encoder: its options, shapes, invariances and initial values."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from clozelab.models.attention import _TwoProducts, attend
from clozelab.models.encoder import Encoder, EncoderOption
from clozelab.models.initialise import initialise
from clozelab.models.linear import Linear
from clozelab.models.norms import norm
from clozelab.models.position import Sizes
from clozelab.models.positions.alibi import AlibiOption, slopes
from clozelab.models.positions.learned import LearnedOption
from clozelab.models.positions.none import NoneOption
from clozelab.models.positions.relative_key import RelativeKeyOption
from clozelab.models.positions.rope import RopeOption
from clozelab.models.positions.sinusoidal import SinusoidalOption
from clozelab.models.positions.t5_bias import T5BiasOption, bucket
from clozelab.models.pretraining import PretrainingModel
from clozelab.running.compose import compose_run, composer, validate

V, B, S = 61, 5, 7
TOY = EncoderOption(
    hidden=12, layers=3, heads=3, ffn=19, embedding=10, position=LearnedOption(length=9), init_scale=0.3
)


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
        ("heads", 0),
        ("heads", 5),
        ("kv_heads", 0),
        ("kv_heads", 2),
        ("kv_heads", 6),
        ("window", 0),
        ("window", -2),
        ("global_every", -1),
        ("ffn", 0),
        ("activation", "relu6"),
        ("gated_width", "half"),
        ("embedding", 0),
        ("project", False),
        ("position", "rope"),
        ("position", None),
        ("segments", -1),
        ("share", "some"),
        ("share_groups", 0),
        ("share_groups", 3),
        ("share_inner", 0),
        ("norm", "batchnorm"),
        ("norm_place", "middle"),
        ("norm_eps", 0.0),
        ("first_norm", False),
        ("dropout", 1.0),
        ("embedding_dropout", -0.5),
        ("attention_dropout", -0.1),
        ("ffn_dropout", 1.5),
        ("init", "zeros"),
        ("init_scale", 0.0),
        ("output", 0),
        ("output", 8),
    ],
)
def test_an_impossible_setting_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"model\.{key}\b"):
        dataclasses.replace(TOY, **{key: value})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"share": "all", "share_groups": 2}, r"model\.share_groups=2.* must divide model\.layers=3"),
        ({"share": "all", "share_inner": 2}, r"model\.share_inner=2 must divide model\.layers=3"),
        ({"layers": 4, "share": "ffn", "share_groups": 2, "share_inner": 4}, r"must divide model\.layers=4"),
        ({"norm_place": "pre", "first_norm": False, "share": "all"}, r"model\.first_norm=false .* model\.share=all"),
        ({"output": 12}, r"model\.output=12 needs model\.tie_output=false"),
        ({"embedding": None, "output": 10}, r"width 12 as output layer; model\.output=10"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(TOY, **settings)


@pytest.mark.parametrize(
    ("scheme", "settings", "named"),
    [
        (LearnedOption, {"length": 0}, r"model\.position\.length"),
        (LearnedOption, {"offset": -1}, r"model\.position\.offset"),
        (RelativeKeyOption, {"length": 0}, r"model\.position\.length"),
        (RopeOption, {"theta": 1.0}, r"model\.position\.theta"),
        (RopeOption, {"local_theta": 0.0}, r"model\.position\.local_theta"),
        (SinusoidalOption, {"base": 1.0}, r"model\.position\.base"),
        (T5BiasOption, {"buckets": 2}, r"model\.position\.buckets"),
        (T5BiasOption, {"buckets": 30}, r"model\.position\.buckets"),
        (T5BiasOption, {"furthest": 8}, r"model\.position\.furthest"),
    ],
)
def test_an_impossible_position_setting_is_refused_by_name(scheme: Any, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        scheme(**settings)


def test_rope_wants_heads_of_even_width() -> None:
    option = dataclasses.replace(TOY, hidden=15, position=RopeOption())
    with pytest.raises(ValueError, match=r"model/position=rope .* model\.hidden / model\.heads is 5"):
        option.build(V, 0)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model/position=nosuch"], r"Could not find 'model/position/nosuch'.* relative_key .*rope"),
        (["model.position=rope"], r"model\.position must be an option .*model/position=NAME"),
        (["model.position.lenght=3"], r"did you mean model\.position\.length\?"),
        (["model/position=rope", "model.position.length=3"], r"the option that has this key was not chosen"),
        (["model/position=rope", "model.position.theta=high"], r"\(key model\.position\.theta\)"),
        (["model/position=rope", "model.hidden=130"], r"model/position=rope turns pairs .* is 65"),
        (["model.position.length=64"], r"format\.max_length is 128 but model\.position\.length is 64"),
        (["model.window=-2"], r"^model\.window must be null or at least 1, not -2"),
        (["model.kv_heads=3"], r"^model\.kv_heads=3 must divide model\.heads=2"),
        (["model.heads=3"], r"^model\.heads=3 must divide model\.hidden=128"),
        (["model.norm=batchnorm"], r"^model\.norm must be one of layernorm, rmsnorm"),
    ],
)
def test_a_composed_model_that_cannot_be_is_refused_by_name(overrides: list[str], named: str) -> None:
    with composer(), pytest.raises(ValueError, match=named):
        validate(compose_run(overrides))


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


@pytest.mark.parametrize(
    ("share", "groups", "inner", "attention", "ffn"),
    [
        ("none", 1, 1, [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
        ("attention", 1, 1, [0] * 6, [0, 1, 2, 3, 4, 5]),
        ("ffn", 1, 1, [0, 1, 2, 3, 4, 5], [0] * 6),
        ("all", 1, 1, [0] * 6, [0] * 6),
        ("all", 2, 1, [0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1]),
        ("all", 1, 3, [0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 2]),
        ("ffn", 3, 2, [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
        ("attention", 3, 1, [0, 0, 1, 1, 2, 2], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_which_block_a_layer_applies(share: str, groups: int, inner: int, attention: list[int], ffn: list[int]) -> None:
    option = dataclasses.replace(TOY, layers=6, share=share, share_groups=groups, share_inner=inner)
    assert (option.owners("attention"), option.owners("ffn")) == (attention, ffn)
    encoder = toy(option)
    halves = [
        f"{part}{n}" for n, block in enumerate(encoder.blocks) for part in ("attention", "ffn") if hasattr(block, part)
    ]
    assert sorted(halves) == sorted({f"attention{n}" for n in attention} | {f"ffn{n}" for n in ffn})


@pytest.mark.parametrize("place", ["post", "pre", "sandwich"])
def test_one_layer_is_the_equations(place: str) -> None:
    """Written out with softmax and matrix products, in the order of the docstrings, at one sequence."""
    option = dataclasses.replace(
        TOY, layers=1, kv_heads=1, activation="swiglu", norm_place=place, position=AlibiOption(), segments=0
    )
    encoder = toy(option).eval()
    ids, segments, _ = inputs()
    state = {name: value for name, value in encoder.named_parameters() if not name.startswith("embeddings")}
    with torch.no_grad():
        for value in state.values():
            value += torch.randn(value.shape, generator=torch.Generator().manual_seed(1)) * 0.1

    def normed(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + option.norm_eps).sqrt()
        return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]

    def product(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].t() + state[f"{name}.bias"]

    def attention(x_SH: Tensor) -> Tensor:
        mixed = product(x_SH, "blocks.0.attention.qkv")
        k_SD, v_SD = mixed[:, 12:16], mixed[:, 16:20]
        read = []
        for n, m in enumerate(slopes(3)):
            apart = (torch.arange(S)[:, None] - torch.arange(S)).abs()
            score = mixed[:, 4 * n : 4 * n + 4] @ k_SD.t() / 4**0.5 - m * apart
            read.append(score.softmax(-1) @ v_SD)
        return product(torch.cat(read, -1), "blocks.0.attention.output")

    def ffn(x_SH: Tensor) -> Tensor:
        gate, value = product(x_SH, "blocks.0.ffn.up").chunk(2, -1)
        return product(gate * gate.sigmoid() * value, "blocks.0.ffn.down")

    embedded = encoder.embeddings(encoder.embeddings.token(ids), segments, torch.arange(S)[None])
    expected = []
    for x in embedded:
        for half, name in ((attention, "attention"), (ffn, "ffn")):
            before, after = f"blocks.0.{name}_norm", f"blocks.0.{name}_out_norm"
            if place == "post":
                x = normed(x + half(x), before)
            elif place == "pre":
                x = x + half(normed(x, before))
            else:
                x = x + normed(half(normed(x, before)), after)
        expected.append(x if place == "post" else normed(x, "norm"))
    torch.testing.assert_close(encoder(ids, segments, None), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_rmsnorm_is_its_equation() -> None:
    layer = norm("rmsnorm", 6, 0.5, bias=True)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(3, 6)
    expected = x / (x.square().mean(-1, keepdim=True) + 0.5).sqrt() * layer.weight
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_layer_has_as_many_parameters_as_an_ungated_one(bias: bool) -> None:
    def parameters(activation: str, gated_width: str = "matched") -> int:
        option = EncoderOption(
            hidden=48, layers=1, heads=2, ffn=192, activation=activation, gated_width=gated_width, bias=bias
        )
        return sum(parameter.numel() for parameter in option.build(V, 0).blocks[0].ffn.parameters())

    one_wider = 3 * 48 + 2 * bias
    assert abs(parameters("geglu") - parameters("gelu")) <= one_wider / 2
    assert parameters("geglu", "ffn") == 3 * 48 * 192 + (2 * 192 + 48) * bias


def influence(option: EncoderOption) -> Tensor:
    """[S, S] bool: whether the output at a place changes with the token at another."""
    encoder = toy(option).eval()
    ids, segments, _ = inputs()
    changed = ids[:1].repeat(S, 1)
    changed[torch.arange(S), torch.arange(S)] = changed.diagonal() % (V - 1) + 1
    with torch.no_grad():
        before, after = encoder(ids[:1], segments[:1], None), encoder(changed, segments[:1].expand(S, -1), None)
    return ((after - before).abs() > 1e-6).any(-1).t()


def test_local_layers_see_their_window() -> None:
    apart = (torch.arange(S)[:, None] - torch.arange(S)).abs()
    one = dataclasses.replace(TOY, layers=1, window=4, global_every=0)
    assert torch.equal(influence(one), apart <= 2)
    assert torch.equal(influence(dataclasses.replace(one, window=1)), apart == 0)
    assert torch.equal(influence(dataclasses.replace(one, layers=2, window=3)), apart <= 2)
    # Layers 0, 2, 4, ... are global.
    assert bool(influence(dataclasses.replace(one, layers=2, window=3, global_every=2)).all())
    windows = [dataclasses.replace(TOY, layers=6, window=4, global_every=3).window_of(n) for n in range(6)]
    assert windows == [None, 4, 4, None, 4, 4]


def test_grouped_keys_are_keys_of_all_heads_that_are_equal() -> None:
    grouped, full = toy(dataclasses.replace(TOY, kv_heads=1)).eval(), toy().eval()
    state = grouped.state_dict()
    for n in range(TOY.layers):
        for kind in ("weight", "bias"):
            name = f"blocks.{n}.attention.qkv.{kind}"
            q, k, v = state[name].split([12, 4, 4])
            state[name] = torch.cat([q, k, k, k, v, v, v])
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(*inputs()), full(*inputs()))


def test_without_positions_order_means_nothing() -> None:
    encoder = toy(dataclasses.replace(TOY, position=NoneOption(), segments=1)).eval()
    ids, segments, mask = inputs()
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    torch.testing.assert_close(encoder(ids[:, order], segments, mask), encoder(ids, segments, mask)[:, order])


@pytest.mark.parametrize("scheme", [AlibiOption(), RopeOption(), RelativeKeyOption(7, keys=True), T5BiasOption(8, 5)])
@pytest.mark.parametrize("window", [None, 4])
def test_a_relative_scheme_sees_distances_alone(scheme: Any, window: int | None) -> None:
    encoder = toy(dataclasses.replace(TOY, position=scheme, window=window, global_every=2)).eval()
    ids, segments, _ = inputs()
    place = torch.arange(S).expand(B, -1)
    with torch.no_grad():
        here, there = (encoder(ids, segments, None, position_ids=place + shift) for shift in (0, 11))
        turned = encoder(ids, segments, None, position_ids=place.flip(1))
    torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)
    # ALiBi sees no direction.
    assert torch.allclose(turned, here, atol=1e-5) == isinstance(scheme, AlibiOption)


def test_alibi_has_the_published_slopes() -> None:
    assert slopes(8) == [2.0**-n for n in range(1, 9)]
    assert slopes(16) == [2 ** (-n / 2) for n in range(1, 17)]
    # Press et al.'s code for 12: those of 8, then every other one of 16.
    assert slopes(12) == [*(2.0**-n for n in range(1, 9)), *(2 ** (-n / 2) for n in (1, 3, 5, 7))]
    assert slopes(1) == [2.0**-8]


def test_t5_has_a_bucket_for_each_small_distance_and_side() -> None:
    apart = torch.arange(-200, 201)
    found = bucket(apart, 32, 128)
    assert found[apart == 0] == 0
    assert found[(apart >= -7) & (apart <= 0)].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    assert found[(apart >= 1) & (apart <= 7)].tolist() == [17, 18, 19, 20, 21, 22, 23]
    assert set(found[apart <= -128].tolist()) == {15}
    assert set(found[apart >= 128].tolist()) == {31}
    ahead = found[apart > 0]
    assert bool((ahead.diff() >= 0).all())
    assert torch.equal(ahead - 16, found[apart < 0].flip(0))


def test_sinusoids_are_the_published_ones() -> None:
    scheme = SinusoidalOption().build(Sizes(embedding=5, heads=1, head_width=5, attentions=1))
    found = scheme.embed(torch.tensor([[0, 3]]))
    assert found is not None
    expected = [[0.0, 1.0, 0.0, 1.0, 0.0]]
    slow, slower = 3 / 10_000 ** (2 / 5), 3 / 10_000 ** (4 / 5)
    expected.append([math.sin(3), math.cos(3), math.sin(slow), math.cos(slow), math.sin(slower)])
    torch.testing.assert_close(found, torch.tensor([expected]))


def test_local_layers_turn_by_their_own_theta() -> None:
    sizes = Sizes(embedding=8, heads=1, head_width=8, attentions=1)
    scheme, place = RopeOption(100.0, local_theta=10.0).build(sizes), torch.tensor([[2]])
    for local, theta in ((False, 100.0), (True, 10.0)):
        expected = torch.tensor([[[2 * theta ** (-2 * k / 8) for k in range(4)]]])
        torch.testing.assert_close(scheme.angles(place, local), expected)


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


@pytest.mark.parametrize(
    ("init", "std"),
    [("truncated", 0.05 * 0.8796), ("normal", 0.05), ("xavier", (2 / 640) ** 0.5), ("fan_in", 128**-0.5)],
)
def test_initial_values_are_those_of_the_scheme(init: str, std: float) -> None:
    option = EncoderOption(hidden=128, layers=2, heads=2, ffn=512, init=init, init_scale=0.05)
    models = {deep: PretrainingModel(dataclasses.replace(option, init_depth=deep), 1000, 0) for deep in (False, True)}
    for model in models.values():
        initialise(model, 0)
    plain, deep = (model.state_dict() for model in models.values())
    assert float(plain["encoder.blocks.1.ffn.up.weight"].std()) == pytest.approx(std, rel=0.03)
    # Tables that are looked up have no fan.
    table = 0.05 if init == "normal" else 0.05 * 0.8796
    assert float(plain["encoder.embeddings.token.weight"][1:].std()) == pytest.approx(table, rel=0.03)
    for name, value in plain.items():
        last = name.endswith(("attention.output.weight", "ffn.down.weight"))
        torch.testing.assert_close(deep[name], value / 2 if last else value)


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
    ours.load_state_dict(theirs.state_dict())
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
