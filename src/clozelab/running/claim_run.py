"""Run a claim: compose, guard and validate every cell, run what is missing, judge.

    claim.yaml + scale -> cells (arm x seed) -> guard -> validate -> frozen configs -> pool -> records -> verdict

Nothing is started before every cell was found sound. A cell is done when its record exists, so running again starts
only what is missing, and a claim that is complete starts nothing.
"""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from clozelab import records
from clozelab.claims.guard import guard
from clozelab.claims.schema import Claim
from clozelab.data.store import data_fingerprint
from clozelab.options import build
from clozelab.running.compose import compose_run, composer, prepare_data, validate
from clozelab.running.directories import freeze, slug
from clozelab.running.pool import Job

# Keys that a claim run sets itself: an override of them on an arm or a scale would silently lose.
OWNED = ("seed", "claim", "arm", "scale", "runs_dir")


@dataclass(frozen=True)
class Cell:
    """One arm x one seed."""

    arm: str
    seed: int
    id: str
    config: dict[str, Any]
    directory: Path

    @property
    def job(self) -> Job:
        """What the pool runs."""
        return Job(name=f"{self.arm} seed {self.seed}", directory=self.directory)

    def record(self) -> records.Record | None:
        """The record of this very cell if it is done, else None."""
        path = self.directory / "record.json"
        if not path.exists():
            return None
        (record,) = records.read_records(path)
        return record if record.cell == self.id else None


@dataclass(frozen=True)
class Plan:
    """Every cell of a claim at a scale."""

    claim: Claim
    scale: str
    directory: Path
    cells: list[Cell]

    def missing(self) -> list[Cell]:
        """Cells without a record."""
        return [cell for cell in self.cells if cell.record() is None]

    def records(self) -> list[records.Record]:
        """The records of the finished cells, in the order of the plan."""
        return [record for cell in self.cells if (record := cell.record()) is not None]

    def strangers(self) -> list[Path]:
        """Directories with a record that this plan does not own: cells of an earlier state of claim, config or data."""
        own = {cell.directory for cell in self.cells}
        return sorted(p.parent for p in self.directory.glob("*/record.json") if p.parent not in own)


def make_plan(
    claim: Claim, scale: str, runs: Path, seeds: int | None = None, overrides: list[str] | None = None
) -> Plan:
    """Compose and guard every cell.

    Args:
        runs: folder of the run tree; the claim's cells lie in `runs/<claim>/<scale>/`.
        seeds: the first n of the scale's seeds (default: all of them).
        overrides: further Hydra overrides for every arm alike; they enter the identity of the cells.

    Raises:
        ValueError: an unknown scale, a key of OWNED overridden, a config that does not compose, or arms that differ
            in an undeclared key.
    """
    level = claim.scale(scale)
    chosen = claim.planned_seeds(scale, seeds)
    directory = runs / claim.id / scale
    common = [*level.overrides, *(overrides or [])]
    by_arm: dict[str, dict[str, Any]] = {}
    with composer():
        for name, arm in claim.arms.items():
            for override in [*common, *arm.overrides]:
                if override.partition("=")[0].lstrip("+~") in OWNED:
                    raise ValueError(f"claim {claim.id}: the override {override!r} sets a key that the claim run owns")
            by_arm[name] = compose_run([*common, *arm.overrides])
    guard(claim, by_arm)
    fingerprints: dict[str, str] = {}
    cells = []
    for seed in chosen:  # seeds outermost: a sweep that is cut short leaves whole pairs behind
        for name, base in by_arm.items():
            config = copy.deepcopy(base) | {
                "seed": seed, "claim": claim.id, "arm": name, "scale": scale, "runs_dir": str(runs),
            }  # fmt: skip
            source = json.dumps([config["corpus"], config["tokenizer"]], sort_keys=True)
            if source not in fingerprints:
                fingerprints[source] = data_fingerprint(build(config["corpus"]), build(config["tokenizer"]))
            cell = records.fingerprint(config, fingerprints[source])
            cells.append(Cell(name, seed, cell, config, directory / f"{slug(name)}-s{seed}-{cell[:8]}"))
    return Plan(claim, scale, directory, cells)


def prepare(plan: Plan) -> None:
    """Validate the missing cells, build the data they need, and freeze their configurations.

    Raises:
        ValueError: any of it fails; nothing was trained.
    """
    seen: set[str] = set()
    for cell in plan.missing():
        config = {**cell.config, "seed": 0, "claim": None, "arm": None, "scale": None}
        key = json.dumps(config, sort_keys=True)
        if key not in seen:
            seen.add(key)
            validate(config)
            prepare_data(config)
    for cell in plan.missing():
        freeze(cell.directory, cell.config)
    frozen = {
        "claim": plan.claim.id,
        "scale": plan.scale,
        "cells": [[c.arm, c.seed, c.id, c.directory.name] for c in plan.cells],
    }
    (plan.directory / "plan.json").write_text(json.dumps(frozen, indent=1) + "\n")


@contextmanager
def locked(plan: Plan) -> Iterator[None]:
    """Hold the claim's run directory: two runs of one claim at one scale would train the same cells.

    Raises:
        ValueError: another run holds it.
    """
    plan.directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(plan.directory / ".lock", timeout=0)
    try:
        with lock:
            yield
    except Timeout as error:
        raise ValueError(
            f"{plan.directory} is in use by another `clozelab run {plan.claim.id}`; "
            "wait for it, or choose another --runs-dir"
        ) from error
