"""The frozen plan of a claim run: what was decided before the first cell, kept in `plan.json` beside the cells.

Cells read their own frozen configurations, so later edits change nothing in a plan that runs. When the claim is run
again after an edit, its cells are other cells: that is refused, with the keys that differ, unless a new plan is asked
for.
"""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clozelab.claims.guard import flatten
from clozelab.records import essential
from clozelab.running.directories import FROZEN, read_frozen

if TYPE_CHECKING:  # `status` and `clean` read plans, and should not wait for what makes them
    from clozelab.running.claim_run import Plan

PLAN = "plan.json"


def read_plan(path: Path) -> dict[str, Any]:
    """A frozen plan: claim, scale, and of each cell [arm, seed, identity, folder].

    Raises:
        ValueError: it cannot be read.
    """
    try:
        plan: dict[str, Any] = json.loads(path.read_text())
        plan["claim"], plan["scale"], [(arm, seed, cell, folder) for arm, seed, cell, folder in plan["cells"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is no plan that can be read ({type(error).__name__}); remove it, and `clozelab run` plans anew"
        ) from error
    return plan


def write_plan(plan: "Plan") -> None:
    """Freeze the plan; cells of the one before that are not in this one (more seeds then) stay in it."""
    cells = {(arm, seed): [arm, seed, cell, folder] for arm, seed, cell, folder in _planned(plan.directory)}
    cells |= {(c.arm, c.seed): [c.arm, c.seed, c.id, c.directory.name] for c in plan.cells}
    frozen = {"claim": plan.claim.id, "scale": plan.scale, "cells": list(cells.values())}
    plan.directory.mkdir(parents=True, exist_ok=True)
    temporary = plan.directory / f"{PLAN}.part"
    temporary.write_text(json.dumps(frozen, indent=1) + "\n")
    temporary.replace(plan.directory / PLAN)


def set_aside(directory: Path) -> None:
    """Keep the plan of earlier runs under another name; its cells stay where they are."""
    if (directory / PLAN).exists():
        (directory / PLAN).replace(directory / f"plan-{time.strftime('%Y%m%d-%H%M%S')}.json")


def check_plan(plan: "Plan") -> None:
    """Hold a plan against the one that is frozen.

    Raises:
        ValueError: an arm or the data have changed since; names the arm, the keys and both values, and the ways out.
    """
    frozen = {(arm, seed): (cell, folder) for arm, seed, cell, folder in _planned(plan.directory)}
    for cell in plan.cells:
        before, folder = frozen.get((cell.arm, cell.seed), (cell.id, ""))
        if before == cell.id:
            continue
        if not (plan.directory / folder / FROZEN).exists():
            continue  # nothing of it was ever started
        changes = _changes(read_frozen(plan.directory / folder), cell.config)
        what = "; ".join(changes) if changes else "the corpus, its tokenizer, or the code that reads them"
        raise ValueError(
            f"{plan.claim.id} has changed since its runs in {plan.directory} were planned: arm {cell.arm}: {what}. "
            "Change it back to go on with that plan, or start a new one with --new-plan (finished cells of the old one "
            "stay, and are not used)"
        )


def _planned(directory: Path) -> list[list[Any]]:
    path = directory / PLAN
    if not path.exists():
        return []
    cells: list[list[Any]] = read_plan(path)["cells"]
    return cells


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """`key was X, is Y` for every key in which two configurations differ."""
    old, new = flatten(essential(before)), flatten(essential(after))
    return [
        f"{key} was {old.get(key, 'not there')}, is {new.get(key, 'not there')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
