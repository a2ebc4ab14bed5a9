"""Run a claim: compose, guard and validate every cell, run what is missing, judge.

    claim.yaml + scale -> cells (arm x seed) -> guard -> validate -> frozen configs -> pool -> records -> verdict

Nothing is started before every cell was found sound. A cell is done when its record exists, so running again starts
only what is missing, and a claim that is complete starts nothing.
"""

import copy
import hashlib
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
from clozelab.running.directories import CHECKPOINT, check_room, freeze, slug
from clozelab.running.job import Job
from clozelab.running.start import pinned

# Keys that a claim run sets itself: an override of them on an arm or a scale would silently lose.
OWNED = ("seed", "claim", "arm", "scale", "runs_dir", "launcher")


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
        return Job(f"{self.arm} seed {self.seed}", self.directory, self.id)

    def record(self) -> records.Record | None:
        """The record of this very cell if it is done, else None.

        Raises:
            ValueError: there is a record that cannot be read.
        """
        path = self.directory / "record.json"
        if not path.exists():
            return None
        found = records.read_records(path)
        if len(found) != 1:
            raise ValueError(f"{path} holds {len(found)} records instead of one; remove it to run the cell again")
        (record,) = found
        return record if record.cell == self.id else None


@dataclass(frozen=True)
class Plan:
    """Every cell of a claim at a scale."""

    claim: Claim
    scale: str
    directory: Path
    cells: list[Cell]
    launcher: dict[str, Any]
    """node of the group `launcher`: where the cells run"""

    @property
    def devices(self) -> int:
        """The most that a cell wants."""
        return max(int(cell.config["trainer"]["devices"]) for cell in self.cells)

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
        overrides: further Hydra overrides for every arm alike; they enter the identity of the cells, but for those of
            the group `launcher`, which say where cells run.

    Raises:
        ValueError: an unknown scale, a key of OWNED overridden, a config that does not compose, or arms that differ
            in an undeclared key.
    """
    level = claim.scale(scale)
    chosen = claim.planned_seeds(scale, seeds)
    extra = [override for override in overrides or [] if _key(override).partition(".")[0] != "launcher"]
    where = [override for override in overrides or [] if override not in extra]
    # With overrides of the user's it is another experiment: it gets a directory, and a report, of its own.
    tag = f"+{hashlib.blake2b(' '.join(extra).encode(), digest_size=4).hexdigest()}" if extra else ""
    directory = runs / claim.id / f"{scale}{tag}"
    common = [*level.overrides, *extra]
    by_arm: dict[str, dict[str, Any]] = {}
    with composer():
        launcher = compose_run(where)["launcher"]
        for name, arm in claim.arms.items():
            for override in [*common, *arm.overrides]:
                if _key(override) in OWNED:
                    raise ValueError(f"claim {claim.id}: the override {override!r} sets a key that the claim run owns")
            for override in common:
                if any(_overlap(_key(override), varied) for varied in claim.varies):
                    raise ValueError(
                        f"claim {claim.id}: the override {override!r} sets what tells the arms apart "
                        f"({', '.join(claim.varies)}); change the arms in {claim.folder / 'claim.yaml'} instead"
                    )
            by_arm[name] = compose_run([*common, *arm.overrides])
            del by_arm[name]["launcher"]
    guard(claim, by_arm)
    starts = {name: pinned(base)["init_from"] for name, base in by_arm.items()}
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
            cell = records.fingerprint(config | {"init_from": starts[name]}, fingerprints[source])
            cells.append(Cell(name, seed, cell, config, directory / f"{slug(name)}-s{seed}-{cell[:8]}"))
    return Plan(claim, scale, directory, cells, launcher)


def _key(override: str) -> str:
    """The dotted key of a Hydra override such as `+model.hidden=3` or `task@x=mlm`."""
    return override.partition("=")[0].lstrip("+~").partition("@")[0].replace("/", ".")


def _overlap(one: str, other: str) -> bool:
    """Whether one of two dotted keys is, or lies above, the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def prepare(plan: Plan, threads: int) -> None:
    """Validate the missing cells, build the data they need, and freeze their configurations.

    Args:
        threads: CPU threads of a cell.

    Raises:
        ValueError: any of it fails; nothing was trained.
    """
    distinct: dict[str, dict[str, Any]] = {}
    for cell in plan.missing():
        config = {**cell.config, "seed": 0, "claim": None, "arm": None, "scale": None}
        distinct[json.dumps(config, sort_keys=True)] = config
    room = max(map(validate, distinct.values()), default=0)
    prepare_data(distinct.values())
    check_room(plan.directory, room * len(plan.missing()), f"{len(plan.missing())} cells")
    for cell in plan.missing():
        # A cell that goes on from a checkpoint keeps its configuration, number of threads included: other sums of
        # floats would be other bits.
        if not (cell.directory / CHECKPOINT).exists():
            trainer = {**cell.config["trainer"], "threads": cell.config["trainer"]["threads"] or threads}
            freeze(cell.directory, {**cell.config, "trainer": trainer})


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
