"""The tables of `clozelab cost`."""

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

_PARAMETERS = {
    "unique": "parameters",
    "shared": "  applied by several layers",
    "embedding": "  in embeddings",
    "non_embedding": "  elsewhere",
    "applied": "applied: if layers shared nothing",
}
_PARTS = {
    "embedding": "projection of the embedding",
    "attention": "attention",
    "ffn": "feed-forward layers",
    "mlm_head": "masked-language-model head ({targets} targets a sequence)",
    "pair_head": "pair head",
    "replaced_head": "head of replaced tokens",
}
_MEMORY = {
    "weights": "weights",
    "gradients": "gradients",
    "moments": "moments of the optimizer",
    "activations": "activations kept for backward",
    "total": "sum",
}


def print_run(found: dict[str, Any]) -> None:
    """The cost of one run, as `running.cost.run_cost` gives it."""
    console, model, shape = Console(), found["model"], found["shape"]
    flops, budget, memory = found["flops"], found["budget"], found["memory"]
    size = f"{model['layers']} layers of {model['hidden']:,}, vocabulary of {model['vocab_size']:,}"

    table = _table(size, "")
    for key, says in _PARAMETERS.items():
        table.add_row(says, f"{found['parameters'][key]:,}")
    table.add_section()
    table.add_row("FLOPs a token", _flops(flops["per_token"]))
    table.add_row(f"FLOPs a step ({shape['batch_size']:,} x {shape['max_length']:,} tokens)", _flops(flops["per_step"]))
    for part, count in flops["parts_per_step"].items():
        if count:
            name = part.removeprefix("generator_")
            says = ("generator: " if name != part else "") + _PARTS[name].format(targets=shape["targets"])
            table.add_row(f"  {says}", f"{count / flops['per_step']:.1%}")
    if flops["total"] is not None:
        steps = f"{budget['steps']:,} steps, {budget['tokens']:,} tokens"
        table.add_row(f"FLOPs in all ({steps})", _flops(flops["total"]))
    if found["hours"] is not None:
        table.add_row(f"hours at {found['tflops']:g} TFLOP/s", _hours(found["hours"]))
    console.print(table)

    devices = ("cpu", "gpu")
    headings = [f"{device.upper()}, {memory[device]['precision']}" for device in devices]
    table = _table(f"memory of a step on one device, {memory['sequences']:,} sequences at a time", *headings)
    for key, says in _MEMORY.items():
        if key == "total":
            table.add_section()
        table.add_row(says, *(_bytes(memory[device][key]) for device in devices))
    console.print(table)

    for note in _notes(found):
        console.print(note, highlight=False, markup=False)


def print_claim(found: dict[str, Any]) -> None:
    """The cost of a claim: an arm a line, and the sum over arms and seeds."""
    timed = found["tflops"] is not None
    table = _table(
        f"{found['claim']} at scale {found['scale']}: {len(found['arms'])} arms x {found['seeds']} seeds",
        *("parameters", "applied", "steps", "FLOPs a run"),
        *(["hours a run"] if timed else []),
    )
    for name, arm in found["arms"].items():
        parameters, steps = arm["parameters"], arm["budget"]["steps"]
        cells = [_millions(parameters["unique"]), _millions(parameters["applied"]), _or_dash(steps, "{:,}".format)]
        cells.append(_or_dash(arm["flops"]["total"], _flops))
        table.add_row(name, *cells, *([_or_dash(arm["hours"], _hours)] if timed else []))
    table.add_section()
    total = ["", "", "", _or_dash(found["flops"], _flops)]
    table.add_row("all runs", *total, *([_or_dash(found["hours"], _hours)] if timed else []))
    console = Console()
    console.print(table)
    for note in _notes(next(iter(found["arms"].values()))):
        console.print(note, highlight=False, markup=False)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _notes(found: dict[str, Any]) -> list[str]:
    notes = ["Sequences are taken as full; FLOPs count products, forward and backward (training/cost.py)."]
    if found["model"]["vocab_is_trained"]:
        notes.append("The tokenizer is still to be trained: a small corpus may give less than tokenizer.vocab_size.")
    if found["budget"]["steps"] is None:
        notes.append("The budget is a time: give --tflops for the steps that it will hold.")
    if "memory" in found:
        notes.append("Activations are counted for a CPU and estimated for a GPU (training/memory.py).")
    return notes


def _or_dash(value: Any, written: Callable[[Any], str]) -> str:
    return "-" if value is None else written(value)


def _flops(count: float) -> str:
    return f"{count:.3e}"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.2f} M"


def _hours(hours: float) -> str:
    return f"{hours:,.2f}" if hours >= 0.1 else f"{hours:.2g}"


def _bytes(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"
