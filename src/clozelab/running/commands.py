"""What the commands that need the training island do."""

from pathlib import Path

from rich.console import Console

from clozelab.claims.commands import present, write_evidence
from clozelab.claims.schema import resolve_claim
from clozelab.paths import runs_dir
from clozelab.running.claim_run import locked, make_plan, prepare
from clozelab.running.display import console_of
from clozelab.running.forecast import forecast
from clozelab.running.job import Outcome
from clozelab.running.planning import check_plan, set_aside, write_plan
from clozelab.running.pool import ended_by_signals
from clozelab.running.sweep import launcher_of, run_sweep


def run(
    name: str,
    scale: str,
    seeds: int | None,
    runs: Path | None,
    overrides: list[str],
    dry_run: bool = False,
    new_plan: bool = False,
) -> int:
    """Run what is missing of a claim, then print its verdict and write its report into the run tree.

    Raises:
        ValueError: the claim, a config or the data cannot run, or the claim has changed since its runs were planned;
            nothing was trained.
        Interrupted: by a signal, after the running cells were ended.
    """
    claim = resolve_claim(name)
    plan = make_plan(claim, scale, runs or runs_dir(), seeds, overrides)
    launcher = launcher_of(plan.launcher, plan.devices)
    if not new_plan:
        check_plan(plan)
    missing = plan.missing()
    console = console_of(stderr=True)
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
        console.print(forecast(plan))
        return 0
    outcomes: list[Outcome] = []
    if missing or new_plan:
        with locked(plan):
            if not new_plan:  # asked again under the lock: another run may have planned since, and finished some
                check_plan(plan)
            prepare(plan, launcher.threads(plan.devices))
            if new_plan:
                set_aside(plan.directory)
            write_plan(plan)
            if jobs := [cell.job for cell in plan.missing()]:
                with ended_by_signals():
                    outcomes = run_sweep(jobs, launcher, plan.devices)
    found = plan.records()
    science = [override for override in overrides if not override.startswith("launcher")]
    if science:
        print(f"not the claim as published: every arm has {' '.join(science)}\n")
    if found:
        present(claim, found, scale, plan.directory)
    unfinished = len(plan.missing()) if outcomes else 0
    return 1 if unfinished or any(outcome.failed for outcome in outcomes) else 0


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
