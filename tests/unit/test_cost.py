"""Parameters and FLOPs: the formula against what torch counts in a real pass, ours and Hugging Face's."""

import dataclasses
from typing import Any

import pytest
import torch
from batchhelp import full_batch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from clozelab.models.encoder import EncoderOption
from clozelab.models.initialise import initialise
from clozelab.models.positions.learned import LearnedOption
from clozelab.models.positions.relative_key import RelativeKeyOption
from clozelab.models.pretraining import PretrainingModel
from clozelab.options import build, discover, registered
from clozelab.training.cost import flops, forward_flops, forward_parts, parameters

# No two sizes are equal, so that none can stand for another.
TOY = EncoderOption(hidden=96, layers=4, heads=6, ffn=230, position=LearnedOption(length=64))
B, S, V, K = 3, 64, 1000, 9
SHAPE = {"batch_size": B, "length": S, "vocab_size": V, "targets": K}

AXES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one layer": {"layers": 1},
    "all shared": {"share": "all"},
    "attention shared": {"share": "attention"},
    "ffn shared in groups": {"share": "ffn", "share_groups": 2},
    "shared by units": {"share": "all", "share_groups": 1, "share_inner": 2},
    "factorised": {"embedding": 32},
    "projected at the same width": {"project": True},
    "untied": {"tie_output": False},
    "output of its own width": {"tie_output": False, "embedding": 32, "output": 48},
    "grouped queries": {"kv_heads": 2},
    "multi-query": {"kv_heads": 1},
    "gated, matched": {"activation": "geglu"},
    "gated, wide": {"activation": "swiglu", "gated_width": "ffn"},
    "local": {"window": 16, "global_every": 2},
    "pre": {"norm_place": "pre", "norm": "rmsnorm", "bias": False},
    "sandwich": {"norm_place": "sandwich", "embedding_norm": False, "segments": 0},
    "no first norm": {"norm_place": "pre", "first_norm": False},
    "relative keys, both": {"position": RelativeKeyOption(length=64, keys=True), "kv_heads": 2},
    "relative keys, shared": {"position": RelativeKeyOption(length=64), "share": "attention", "share_groups": 2},
}


def toy(name: str) -> EncoderOption:
    return dataclasses.replace(TOY, **AXES[name])


def preset(name: str) -> EncoderOption:
    from clozelab.running.compose import compose_run, composer

    with composer():
        option = build(compose_run([f"model={name}"])["model"])
    assert isinstance(option, EncoderOption)
    return option


def measured(
    option: EncoderOption, batch_size: int, length: int, vocab_size: int, targets: int, pair: bool, device: str
) -> tuple[float, float]:
    """(forward, forward and backward) as torch counts them. The flash kernels would count their recomputation."""
    with torch.device(device):
        model = PretrainingModel(option, vocab_size, 0, pair=pair)
    if device != "meta":
        initialise(model, 0)  # values at which the loss on a CPU need not be taken again
    batch = {key: value.to(device) for key, value in full_batch(batch_size, length, vocab_size, targets).items()}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        sums = model(batch)
        forward = counter.get_total_flops()
        loss = sums.mlm_loss + sums.pair_loss if pair else sums.mlm_loss
        loss.backward()
    return forward, counter.get_total_flops()


@pytest.mark.parametrize("length", [128, 512])
@pytest.mark.parametrize(("name", "vocab_size"), [("bert_base", 30522), ("albert_base", 30000)])
def test_a_step_of_the_base_models_costs_what_torch_counts(name: str, vocab_size: int, length: int) -> None:
    option, targets = preset(name), round(0.15 * length)
    forward, step = measured(option, 2, length, vocab_size, targets, True, "meta")
    assert forward_flops(option, 2, length, vocab_size, targets, True) == pytest.approx(forward, rel=0.01)
    assert flops(option, 2, length, vocab_size, targets, True) == pytest.approx(step, rel=0.01)


@pytest.mark.parametrize("length", [128, 512])
@pytest.mark.parametrize(
    ("name", "vocab_size", "theirs"),
    [("bert_base", 30522, "BertForMaskedLM"), ("albert_base", 30000, "AlbertForMaskedLM")],
)
def test_hugging_faces_models_cost_the_same(name: str, vocab_size: int, theirs: str, length: int) -> None:
    transformers = pytest.importorskip("transformers")
    from clozelab.models.hf import hf_config

    option = preset(name)
    config = transformers.AutoConfig.for_model(**hf_config(option, vocab_size, 0))
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = getattr(transformers, theirs)(config).eval()
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(2, length, dtype=torch.long))
    # Theirs computes logits of every position: as if every position were a target.
    expected = forward_flops(option, 2, length, vocab_size, targets=length)
    assert expected == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("axis", AXES)
def test_every_axis_costs_what_torch_counts(axis: str, pair: bool) -> None:
    option = toy(axis)
    forward, step = measured(option, *SHAPE.values(), pair, "meta")
    assert forward_flops(option, **SHAPE, pair=pair) == pytest.approx(forward, rel=0.01)
    assert flops(option, **SHAPE, pair=pair) == pytest.approx(step, rel=0.01)


def test_every_position_scheme_costs_what_torch_counts() -> None:
    discover("clozelab.models")
    for name, scheme in registered("model/position").items():
        option = dataclasses.replace(TOY, position=scheme())
        _, step = measured(option, *SHAPE.values(), False, "meta")
        assert flops(option, **SHAPE) == pytest.approx(step, rel=0.01), name


@pytest.mark.parametrize("axis", ["as it is", "output of its own width", "grouped queries", "relative keys, both"])
def test_a_step_on_a_cpu_does_these_products_and_those_of_the_joined_columns(axis: str) -> None:
    option = toy(axis)
    shape = SHAPE | {"batch_size": 4, "targets": 8}  # 32 targets: others are filled up to a multiple of it
    _, step = measured(option, *shape.values(), False, "cpu")
    joined = 3 * 2 * 32 * V * 32
    assert step == flops(option, **shape) + joined


def test_albert_base_is_twelve_applications_of_one_layer() -> None:
    option = preset("albert_base")
    unshared = dataclasses.replace(option, share="none")
    shape = {"batch_size": 2, "length": 128, "vocab_size": 30000, "targets": 19}
    assert forward_parts(option, **shape) == forward_parts(unshared, **shape)
    with torch.device("meta"):
        model = PretrainingModel(option, 30000, 0)
    applied: list[str] = []
    for name, module in model.encoder.blocks.named_modules():
        if name.endswith((".attention", ".ffn")):
            module.register_forward_hook(lambda *_, name=name: applied.append(name))
    model({key: value.to("meta") for key, value in full_batch(2, 128, 30000, 19).items()})
    assert applied == ["0.attention", "0.ffn"] * 12


BLOCK = {
    "attention": 4 * 96 * 96 + 4 * 96 + 2 * 96,  # four matrices with their biases, and a norm
    "ffn": 2 * 96 * 230 + 96 + 230 + 2 * 96,
}
# Of the table of relative keys that each attention layer owns: 2 x 64 - 1 distances, 16 wide.
RELATIVE = 127 * 16


@pytest.mark.parametrize(
    ("axis", "shared", "spared"),
    [
        ("as it is", 0, 0),
        ("all shared", BLOCK["attention"] + BLOCK["ffn"], 3 * (BLOCK["attention"] + BLOCK["ffn"])),
        ("attention shared", BLOCK["attention"], 3 * BLOCK["attention"]),
        ("ffn shared in groups", 2 * BLOCK["ffn"], 2 * BLOCK["ffn"]),
        ("shared by units", 2 * (BLOCK["attention"] + BLOCK["ffn"]), 2 * (BLOCK["attention"] + BLOCK["ffn"])),
        ("relative keys, shared", 2 * (BLOCK["attention"] + RELATIVE), 2 * (BLOCK["attention"] + RELATIVE)),
    ],
)
def test_shared_parameters_are_counted_once_and_applied_often(axis: str, shared: int, spared: int) -> None:
    with torch.device("meta"):
        counts = parameters(PretrainingModel(toy(axis), V, 0))
    assert counts["shared"] == shared
    assert counts["applied"] - counts["unique"] == spared


@pytest.mark.parametrize("axis", AXES)
def test_applied_parameters_are_those_of_the_same_model_without_sharing(axis: str) -> None:
    option = toy(axis)
    unshared = dataclasses.replace(option, share="none", share_groups=1, share_inner=1)
    with torch.device("meta"):
        here, there = (PretrainingModel(o, V, 0, pair=True) for o in (option, unshared))
    counts = parameters(here)
    assert counts["unique"] == sum(parameter.numel() for parameter in here.parameters())
    assert counts["applied"] == counts["unshared"] == parameters(there)["unique"]
    assert counts["embedding"] + counts["non_embedding"] == counts["unique"]


def test_embeddings_are_those_of_tokens_positions_and_segments() -> None:
    with torch.device("meta"):
        tied, untied = (parameters(PretrainingModel(toy(axis), V, 0)) for axis in ("as it is", "untied"))
    assert tied["embedding"] == untied["embedding"] == (V + 64 + 2) * 96
    assert untied["non_embedding"] - tied["non_embedding"] == V * 96
