"""`clozelab run CLAIM --dry-run`: the cells, what is done of them, and what the rest will take."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from clozelab import records
from clozelab.records import Record
from clozelab.running.claim_run import Cell, Plan
from clozelab.running.cost import run_cost
from clozelab.running.states import cell_state
from clozelab.running.status import clock


def forecast(plan: Plan) -> RenderableType:
    """A line a cell, and what is left to do in all.

    Time is that of finished cells of the same arm, else the arm's FLOPs at the speed of any finished cell of the plan,
    else not known before a first cell has run (a budget in seconds apart).
    """
    done = {(cell.arm, cell.seed): record for cell in plan.cells if (record := cell.record()) is not None}
    flops = {arm: _flops(plan, arm) for arm in {cell.arm for cell in plan.cells}}
    table = Table()
    for heading in ("cell", "state", "time", "FLOPs", "directory"):
        table.add_column(heading, justify="right" if heading in ("time", "FLOPs") else "left")
    seconds: list[float | None] = []
    code = records.provenance().get("code") if done else None
    for cell in plan.cells:
        record = done.get((cell.arm, cell.seed))
        if record is not None:
            took = clock(_spent(record, "seconds"))
            table.add_row(_name(cell), _done(record, code), took, f"{_spent(record, 'flops'):.2e}", cell.directory.name)
            continue
        expected = _seconds(cell, done, flops[cell.arm])
        seconds.append(expected)
        state = cell_state(cell.directory, cell.id).state
        cost = flops[cell.arm]
        table.add_row(
            _name(cell),
            "missing" if state == "waiting" else state,
            "?" if expected is None else f"about {clock(expected)}",
            "?" if cost is None else f"{cost:.2e}",
            cell.directory.name,
        )
    lines: list[RenderableType] = [Text(f"in {plan.directory}:"), table]
    known = [second for second in seconds if second is not None]
    total = sum(
        cost for cell in plan.cells if (cell.arm, cell.seed) not in done and (cost := flops[cell.arm]) is not None
    )
    if seconds:
        said = f"to run: {len(seconds)} cells, {total:.2e} FLOPs"
        if len(known) == len(seconds):
            said += f", about {clock(sum(known))} of training in all, one cell after the other"
        lines.append(Text(said))
    for stranger in plan.strangers():
        lines.append(Text(f"earlier, not used: {stranger.name} (claim, configuration or corpus were others)"))
    return Group(*lines)


def _name(cell: Cell) -> str:
    return f"{cell.arm} seed {cell.seed}"


def _done(record: Record, code: str | None) -> str:
    """Done, and whether by the code that is here now."""
    state = "done" if record.status == "finished" else record.status
    return state if record.provenance.get("code") in (None, code) else f"{state}, by other code"


def _flops(plan: Plan, arm: str) -> float | None:
    config: dict[str, Any] = next(cell.config for cell in plan.cells if cell.arm == arm)
    total: float | None = run_cost(config, with_memory=False)["flops"]["total"]
    return total


def _seconds(cell: Cell, done: dict[tuple[str, int], Record], flops: float | None) -> float | None:
    budget = cell.config["budget"]
    if "seconds" in budget:
        return float(budget["seconds"])
    same = [_spent(record, "seconds") for (arm, _), record in done.items() if arm == cell.arm]
    if same:
        return sum(same) / len(same)
    if not done or flops is None:
        return None
    spent = sum(_spent(record, "seconds") for record in done.values())
    speed = sum(_spent(record, "flops") for record in done.values()) / max(spent, 1e-9)
    return flops / speed if speed > 0 else None


def _spent(record: Record, budget: str) -> float:
    """What a cell has spent; 0 where that was not finite (a cell that diverged)."""
    return record.budgets.get(budget) or 0.0
