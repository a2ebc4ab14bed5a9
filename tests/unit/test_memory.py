"""What a step keeps: counted without memory, against a real step on a CPU, counted in two ways."""

import dataclasses
from typing import Any

import pytest
import torch
from batchhelp import full_batch
from torch.profiler import ProfilerActivity, profile

from clozelab.models.encoder import EncoderOption
from clozelab.models.initialise import initialise
from clozelab.models.positions.alibi import AlibiOption
from clozelab.models.positions.learned import LearnedOption
from clozelab.models.positions.relative_key import RelativeKeyOption
from clozelab.models.positions.rope import RopeOption
from clozelab.models.pretraining import PretrainingModel
from clozelab.training.memory import _kept_on_cpu, _kept_on_gpu, by_layers, kept_bytes, memory
from clozelab.training.precision import autocast

MID = EncoderOption(hidden=128, layers=4, heads=4, ffn=512, position=LearnedOption(length=128))
SHAPE = (8, 128, 2000, 19)
AXES: dict[str, dict[str, Any]] = {
    "bert": {},
    "albert": {"embedding": 32, "share": "all", "activation": "gelu_new"},
    "no dropout": {"dropout": 0.0, "attention_dropout": 0.0},
    "modern": {
        "norm_place": "pre", "first_norm": False, "activation": "geglu", "bias": False, "position": RopeOption(),
        "window": 32, "kv_heads": 2, "tie_output": False, "output": 64,
    },
    "sandwich": {"norm_place": "sandwich", "norm": "rmsnorm", "position": AlibiOption()},
    "relative": {"position": RelativeKeyOption(length=128, keys=True)},
}  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("axis", AXES)
def test_a_step_on_a_cpu_keeps_what_was_counted(axis: str, precision: str) -> None:
    option = dataclasses.replace(MID, **AXES[axis])
    model, batch = PretrainingModel(option, SHAPE[2], 0, pair=True), full_batch(*SHAPE)
    initialise(model, 0)

    def forward() -> object:
        with autocast(precision, "cpu"):
            return model(batch)

    estimate = memory(option, *SHAPE, True, "cpu", precision)["activations"]
    assert estimate == pytest.approx(kept_bytes(forward, model), rel=0.02)


@pytest.mark.parametrize("axis", ["bert", "albert", "modern"])
def test_the_allocator_agrees(axis: str) -> None:
    """What a forward pass has allocated and not given back when it ends."""
    option = dataclasses.replace(MID, **AXES[axis])
    model, batch = PretrainingModel(option, SHAPE[2], 0, pair=True), full_batch(*SHAPE)
    initialise(model, 0)
    model(batch)  # what torch keeps for good is allocated here
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        sums = model(batch)
    held = sum(event.self_cpu_memory_usage for event in profiler.key_averages())
    assert memory(option, *SHAPE, True, "cpu", "fp32")["activations"] == pytest.approx(held, rel=0.02)
    del sums


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"share": "all"},
        {"share": "ffn", "share_groups": 2, "share_inner": 2},
        {"window": 32, "global_every": 3, "position": RopeOption(local_theta=2e4)},
        {"window": 32, "global_every": 2, "share": "attention", "share_groups": 2, "norm_place": "pre"},
        {"window": 32, "global_every": 0, "norm_place": "pre", "first_norm": False},
    ],
)
def test_deep_encoders_are_counted_from_shallow_ones(change: dict[str, Any], accelerator: str) -> None:
    deep = dataclasses.replace(MID, layers=28, **change)
    depths: list[int] = []

    def count(option: EncoderOption) -> int:
        depths.append(option.layers)
        kept = _kept_on_cpu if accelerator == "cpu" else _kept_on_gpu
        return kept(option, 2, 64, 500, 9, False, "bf16")

    assert by_layers(deep, count) == count(deep)
    assert max(depths[:-1]) < 14


def test_weights_gradients_and_moments_are_four_times_the_parameters() -> None:
    parts = memory(MID, *SHAPE, False, "cpu", "fp32")
    with torch.device("meta"):
        size = 4 * sum(p.numel() for p in PretrainingModel(MID, SHAPE[2], 0).parameters())
    assert (parts["weights"], parts["gradients"], parts["moments"]) == (size, size, 2 * size)


@pytest.mark.parametrize("axis", AXES)
def test_half_the_bits_and_no_scores_keep_less(axis: str) -> None:
    option = dataclasses.replace(MID, **AXES[axis])
    full, half = (memory(option, *SHAPE, True, "cuda", precision)["activations"] for precision in ("fp32", "bf16"))
    assert 0.5 * full < half < full < memory(option, *SHAPE, True, "cpu", "fp32")["activations"]


def test_a_fused_kernel_keeps_no_scores() -> None:
    """On a GPU, by hand: of one layer in bf16, bytes of a position."""
    long = dataclasses.replace(MID, position=LearnedOption(length=512))
    deeper = dataclasses.replace(long, layers=long.layers + 1)
    shape = (4, 512, 2000, 76)
    one, more = (memory(option, *shape, False, "cuda", "bf16")["activations"] for option in (long, deeper))
    hidden, ffn, heads = long.hidden, long.ffn, long.heads
    # Two norms of a float32 stream; input, q, k, v and result of attention; two masks; the feed-forward layer.
    activations = 2 * 4 * hidden + 2 * 5 * hidden + 2 * hidden + (2 * hidden + 2 * 2 * ffn) + 4 * heads
    weights = 2 * (4 * hidden * hidden + 2 * hidden * ffn)
    assert more - one == pytest.approx(activations * 4 * 512 + weights, rel=0.02)
    on_cpu = [memory(option, *shape, False, "cpu", "bf16")["activations"] for option in (long, deeper)]
    assert on_cpu[1] - on_cpu[0] > more - one + 2 * 4 * heads * 512 * 512
