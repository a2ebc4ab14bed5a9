"""`clozelab clean`: what of a run tree nobody needs, shown first, removed on request. Nothing outside the tree.

checkpoints   of finished cells: their record is made; `clozelab export` and `fill` need them
earlier       whole cells that no plan holds any more (claim, configuration or corpus changed)
leftovers     files that a killed process was writing, and checkpoints put aside
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout
from rich.console import Console

from clozelab.running.directories import FROZEN, RUNNING
from clozelab.running.planning import PLAN, read_plan
from clozelab.running.states import cell_state

KINDS = ("checkpoints", "earlier", "leftovers")
PARTS = (
    *(f"{FROZEN}.part", f"{RUNNING}.part", "metrics.part", ".record.json.*", ".scores.npz.*"),
    "checkpoints/last.part",
)
"""What is written beside its place before it takes it."""


class Removable(NamedTuple):
    """A file or folder that can go."""

    path: Path
    kind: str
    bytes: int
    cell: Path
    """the run directory it belongs to"""


def clean(runs: Path, claim: str | None, kinds: list[str], yes: bool) -> int:
    """Show what can go; remove it with `yes`.

    Raises:
        ValueError: an unknown kind, or no run tree.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(f"there is nothing called {', '.join(unknown)} to clean; give {', '.join(KINDS)}")
    if not runs.is_dir():
        raise ValueError(f"no run tree {runs}; give --runs-dir")
    found = [one for one in removable(runs, claim) if one.kind in (kinds or KINDS)]
    console = Console(soft_wrap=True)  # a path that is broken in two is none
    for one in found:
        console.print(f"{one.bytes / 1e6:10,.1f} MB  {one.kind:11}  {one.path}", highlight=False, markup=False)
    total = sum(one.bytes for one in found) / 1e6
    if not yes:
        console.print(
            f"{len(found)} item(s), {total:,.1f} MB; nothing was removed: add --yes to do it", highlight=False
        )
        return 0
    kept = [one for one in found if not _remove(one)]
    for one in kept:
        console.print(f"kept: {one.path}: its cell runs again", highlight=False, markup=False)
    total -= sum(one.bytes for one in kept) / 1e6
    console.print(f"{len(found) - len(kept)} item(s), {total:,.1f} MB removed", highlight=False)
    return 0


def _remove(one: Removable) -> bool:
    """Remove it, holding the lock of its cell, so that none starts meanwhile; False: one runs.

    A whole cell goes under the lock of its claim run as well, which may be about to plan it.
    """
    folders = [one.cell.parent, one.cell] if one.kind == "earlier" else [one.cell]
    try:
        with contextlib.ExitStack() as locks:
            for folder in folders:
                locks.enter_context(FileLock(folder / ".lock", timeout=0))
            if one.kind == "earlier" and not _is_of_no_plan(one.cell):
                return False  # planned since
            if one.path.is_dir():
                shutil.rmtree(one.path)
            else:
                one.path.unlink(missing_ok=True)
    except Timeout:
        return False
    return True


def _is_of_no_plan(directory: Path) -> bool:
    """Whether there is a plan of this claim run, and it does not hold the cell; one that cannot be read holds all."""
    plan = directory.parent / PLAN
    if not plan.exists():
        return False
    try:
        return directory.name not in {folder for _, _, _, folder in read_plan(plan)["cells"]}
    except ValueError:
        return False


def removable(runs: Path, claim: str | None) -> Iterator[Removable]:
    """What can go of a run tree; never of a cell that runs, and nothing that a symbolic link leads to."""
    root = runs.resolve()
    for one in _removable(root, claim):
        if one.path.resolve() == one.path:
            yield one


def _removable(root: Path, claim: str | None) -> Iterator[Removable]:
    for directory in sorted({path.parent for path in root.glob("*/**/config.yaml")}):
        if claim is not None and directory.relative_to(root).parts[0] != claim:
            continue
        state = cell_state(directory).state
        if state in ("running", "silent"):
            continue
        if _is_of_no_plan(directory):
            yield Removable(directory, "earlier", _size(directory), directory)
            continue
        checkpoints = directory / "checkpoints"
        done = state in ("done", "diverged")
        if done and checkpoints.is_dir():
            yield Removable(checkpoints, "checkpoints", _size(checkpoints), directory)
        elif checkpoints.is_dir():
            for old in sorted(checkpoints.glob("last.*.ckpt")):
                yield Removable(old, "leftovers", old.stat().st_size, directory)
        for part in sorted(path for pattern in PARTS for path in directory.glob(pattern)):
            if not (done and part.parent == checkpoints):
                yield Removable(part, "leftovers", part.stat().st_size, directory)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
