"""What the commands that need the training island do."""

import os
from pathlib import Path

from rich.console import Console

from clozelab.claims.commands import present, write_evidence
from clozelab.claims.schema import resolve_claim
from clozelab.paths import runs_dir
from clozelab.running.claim_run import locked, make_plan, prepare
from clozelab.running.display import SweepDisplay
from clozelab.running.pool import Job, Outcome, cores, run_jobs


def gpus() -> list[str]:
    """Ids of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES would name them."""
    import torch

    if not torch.cuda.is_available():
        return []
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named or [str(index) for index in range(torch.cuda.device_count())]


def slot_devices(slots: int | None, devices: int) -> tuple[int, list[str] | None]:
    """How many cells at a time, and the GPUs that each of them sees.

    One cell a GPU (or a group of `devices` GPUs); without a GPU, one a CPU core: two one-thread cells beat one
    two-thread cell at small size.

    Raises:
        ValueError: fewer GPUs than a cell wants, or more cells at a time than GPUs hold.
    """
    available = gpus()
    if not available:
        return slots or max(1, cores() // devices), None
    groups = [",".join(available[i : i + devices]) for i in range(0, len(available) - devices + 1, devices)]
    if not groups or (slots or 1) > len(groups):
        raise ValueError(
            f"{slots or 1} cell(s) at a time with trainer.devices={devices} want more GPUs than the {len(available)} "
            "here; lower --slots or trainer.devices"
        )
    return slots or len(groups), groups


def run_pool(jobs: list[Job], slots: int, gpu_groups: list[str] | None) -> list[Outcome]:
    """Run jobs under the display, and name the failed ones at the end."""
    console = Console(stderr=True)
    with SweepDisplay(len(jobs), console) as display:
        outcomes = run_jobs(jobs, slots, gpu_groups, on_start=display.start, on_end=display.end, on_tick=display.tick)
    failed = [outcome for outcome in outcomes if not outcome.done]
    if failed:
        console.print(f"{len(failed)} of {len(jobs)} failed:", style="red")
        for outcome in failed:
            console.print(f"  {outcome.job.name}: {outcome.reason}", highlight=False, markup=False)
    return outcomes


def run(
    name: str, scale: str, seeds: int | None, slots: int | None, runs: Path | None, overrides: list[str], dry_run: bool
) -> int:
    """Run what is missing of a claim, then print its verdict and write its report into the run tree.

    Raises:
        ValueError: the claim, a config or the data cannot run; nothing was trained.
    """
    if slots is not None and slots < 1:
        raise ValueError(f"--slots is {slots}; it must be at least 1")
    claim = resolve_claim(name)
    plan = make_plan(claim, scale, runs or runs_dir(), seeds, overrides)
    missing = plan.missing()
    console = Console(stderr=True)
    console.print(
        f"{claim.id} at scale {scale}: {len(plan.cells)} cells, "
        f"{len(plan.cells) - len(missing)} done, {len(missing)} to run",
        highlight=False,
    )
    if strangers := plan.strangers():
        console.print(
            f"{len(strangers)} record(s) in {plan.directory} belong to an earlier claim, configuration or corpus "
            "and are not used",
            highlight=False,
        )
    if dry_run:
        for cell in plan.cells:
            state = "missing" if cell.record() is None else "done"
            console.print(f"  {state:8} {cell.arm} seed {cell.seed}  {cell.directory}", highlight=False)
        return 0
    outcomes: list[Outcome] = []
    if missing:
        devices = max(cell.config["trainer"]["devices"] for cell in missing)
        slots, gpu_groups = slot_devices(slots, devices)
        with locked(plan):
            prepare(plan, slots)
            # Asked again under the lock: another run may have finished some since.
            outcomes = run_pool([cell.job for cell in plan.missing()], slots, gpu_groups)
    found = plan.records()
    if overrides:
        print(f"not the claim as published: every arm has {' '.join(overrides)}\n")
    if found:
        present(claim, found, scale, plan.directory)
    return 1 if any(not outcome.done for outcome in outcomes) else 0


def publish(name: str, scale: str, runs: Path | None) -> int:
    """Append the finished cells of the run tree to the claim's evidence, and write its README and plot.

    Raises:
        ValueError: nothing is finished, or the evidence holds the same cell with another result.
    """
    claim = resolve_claim(name)
    plan = make_plan(claim, scale, runs or runs_dir())
    done = [(record, cell.directory) for cell in plan.cells if (record := cell.record()) is not None]
    if not done:
        raise ValueError(
            f"{plan.directory} holds no finished cell of {claim.id}; `clozelab run {claim.id} --scale {scale}` first"
        )
    write_evidence(claim, scale, done)
    return 0


def corpus(overrides: list[str]) -> int:
    """Print what a corpus holds, per split, and what looks wrong with it."""
    from rich.table import Table

    from clozelab.data.describe import describe
    from clozelab.data.store import cache_dir
    from clozelab.options import build
    from clozelab.running.compose import compose_run, composer

    with composer():
        config = compose_run(overrides)
    described = describe(build(config["corpus"]), build(config["tokenizer"]), cache_dir())
    splits: dict[str, dict[str, int]] = described["splits"]
    table = Table(title=f"corpus {described['corpus']}, {described['vocabulary']:,} vocabulary entries")
    table.add_column("")
    for split in splits:
        table.add_column(split, justify="right")
    table.add_column("all", justify="right")
    for row in next(iter(splits.values())):
        counts = [splits[split][row] for split in splits]
        table.add_row(row.replace("_", " "), *(f"{count:,}" for count in [*counts, sum(counts)]))
    console = Console()
    console.print(table)
    for warning in described["warnings"]:
        console.print(f"warning: {warning}", highlight=False, markup=False)
    print(f"store: {described['path']}")
    return 0
