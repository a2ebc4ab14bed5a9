"""`clozelab cost`: what a run, or a claim, would cost; without reading data and without memory for the model."""

import json
import math
from pathlib import Path
from typing import Any

from clozelab.claims.guard import guard
from clozelab.claims.schema import resolve_claim
from clozelab.options import build
from clozelab.running.compose import compose_run, composer, validate
from clozelab.running.cost_tables import print_claim, print_run

# Losing less than this share of a step to rounding is not a step more.
_ROUNDING = 1e-9


def cost(words: list[str], scale: str, tflops: float | None, as_json: bool) -> int:
    """Print the cost of the run that the overrides describe, or of the claim that is named among them.

    Args:
        words: Hydra overrides, and at most one claim.
        scale: of the claim.
        tflops: sustained speed in 10^12 FLOP/s, for a time; None: none is printed.
        as_json: print one JSON object.

    Raises:
        ValueError: the configuration cannot run.
    """
    if tflops is not None and not tflops > 0:
        raise ValueError(f"--tflops is {tflops}; it must be greater than 0")
    names = [word for word in words if "=" not in word and not word.startswith("~")]
    overrides = [word for word in words if word not in names]
    if len(names) > 1:
        raise ValueError(f"{' '.join(names)}: give one claim, or overrides such as model={names[0]}")
    with composer():
        found = _claim_cost(names[0], scale, overrides, tflops) if names else run_cost(compose_run(overrides), tflops)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        (print_claim if names else print_run)(found)
    return 0


def run_cost(config: dict[str, Any], tflops: float | None = None, with_memory: bool = True) -> dict[str, Any]:
    """What one run costs, as plain numbers: parameters, FLOPs, bytes, and how they came about.

    Sequences are taken as full: a corpus with short documents takes more steps for as many non-pad tokens.

    Raises:
        ValueError: the configuration cannot run.
    """
    import torch

    from clozelab.training import cost as counting
    from clozelab.training.budget import Spent

    validate({**config, "evaluation": {}})  # which measures nothing here
    option, length, batch_size = build(config["model"]), config["format"]["max_length"], config["batch_size"]
    if config["batch_tokens"] is not None:
        batch_size = max(1, config["batch_tokens"] // length)
    task, masking = build(config["task"]), build(config["masking"])
    targets, pair, generator = masking.targets(length), task.has_pair, task.generator(option)
    vocab_size, trained = _vocabulary(config["tokenizer"])
    with torch.device("meta"):
        model = task.build(option, vocab_size, 0, masking.causal)
    shape = (option, batch_size, length, vocab_size, targets, pair, generator)
    per_step, tokens = counting.flops(*shape), batch_size * length
    one_step = Spent(1, tokens, tokens, batch_size * targets, batch_size, per_step)
    if tflops is not None:
        one_step.seconds = per_step / (tflops * 1e12)
    share = build(config["budget"]).progress(one_step)
    steps = math.ceil(1 / share * (1 - _ROUNDING)) if share else None
    total = None if steps is None else steps * per_step
    found: dict[str, Any] = {
        "model": {
            "layers": option.layers,
            "hidden": option.hidden,
            "vocab_size": vocab_size,
            "vocab_is_trained": trained,
        },
        "shape": {"batch_size": batch_size, "max_length": length, "targets": targets, "pair": pair},
        "parameters": counting.parameters(model),
        "flops": {
            "per_token": per_step / tokens,
            "per_step": per_step,
            "total": total,
            "parts_per_step": {part: 3 * flops for part, flops in counting.forward_parts(*shape).items()},
        },
        "budget": {"steps": steps, "tokens": None if steps is None else steps * tokens},
        "hours": None if total is None or tflops is None else total / (tflops * 1e12) / 3600,
        "tflops": tflops,
    }
    if with_memory:
        found["memory"] = _memory(config, option, vocab_size, targets, pair, generator)
    return found


def _vocabulary(node: dict[str, Any]) -> tuple[int, bool]:
    """(entries, whether they are the goal of a training that may fall short of it)."""
    option = build(node)
    if hasattr(option, "vocab_size"):
        return int(option.vocab_size), True
    return int(option.load(lambda: (), "", Path()).vocab_size), False


def _memory(
    config: dict[str, Any], option: Any, vocab_size: int, targets: int, pair: bool, generator: Any
) -> dict[str, Any]:
    """Bytes of a step on one device, on a CPU and on a GPU, each in the precision that the run would take there."""
    from clozelab.training.memory import memory
    from clozelab.training.precision import choose_precision

    trainer, length = config["trainer"], config["format"]["max_length"]
    sequences = config["batch_size"] // (trainer["accumulate"] * trainer["devices"])
    wanted = trainer["precision"]
    # This machine need not have the GPU that the run will have: one of today computes in bf16.
    precisions = {"cpu": choose_precision(wanted, "cpu"), "gpu": "bf16" if wanted == "auto" else wanted}
    found: dict[str, Any] = {"sequences": sequences}
    for device, precision in precisions.items():
        accelerator = "cpu" if device == "cpu" else "cuda"
        parts = memory(option, sequences, length, vocab_size, targets, pair, accelerator, precision, generator)
        if trainer["strategy"] == "fsdp":
            parts |= {key: math.ceil(parts[key] / trainer["devices"]) for key in ("weights", "gradients", "moments")}
        found[device] = {"precision": precision, **parts, "total": sum(parts.values())}
    return found


def _claim_cost(name: str, scale: str, overrides: list[str], tflops: float | None) -> dict[str, Any]:
    try:
        claim = resolve_claim(name)
    except ValueError as error:
        raise ValueError(f"{error}; a run is given by overrides, such as model={name}") from None
    common = [*claim.scale(scale).overrides, *overrides]
    configs = {name: compose_run([*common, *arm.overrides]) for name, arm in claim.arms.items()}
    guard(claim, configs)
    seeds = len(claim.planned_seeds(scale))
    arms = {name: run_cost(config, tflops, with_memory=False) for name, config in configs.items()}
    totals = [arm["flops"]["total"] for arm in arms.values()]
    total = None if None in totals else seeds * sum(totals)
    hours = None if total is None or tflops is None else total / (tflops * 1e12) / 3600
    return {
        "claim": claim.id,
        "scale": scale,
        "seeds": seeds,
        "arms": arms,
        "flops": total,
        "hours": hours,
        "tflops": tflops,
    }
