"""`clozelab status`: every planned cell of the run tree, arm by seed."""

import contextlib
import time
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from clozelab.running.directories import CHECKPOINT
from clozelab.running.display import console_of
from clozelab.running.planning import PLAN, read_plan
from clozelab.running.states import CellState, cell_state

_STYLES = {
    "done": "green",
    "running": "cyan",
    "failed": "red",
    "diverged": "magenta",
    "silent": "yellow",
    "waiting": "dim",
}


def status(runs: Path, claim: str | None, watch: float | None) -> int:
    """Print the state of every planned claim run, or of one claim.

    Args:
        runs: the run tree.
        claim: only this one.
        watch: draw it again every so many seconds until interrupted.

    Raises:
        ValueError: nothing was planned there.
    """
    console = console_of()
    if watch is None:
        console.print(tables(runs, claim))
        return 0
    if not watch > 0:
        raise ValueError(f"--watch is {watch}; give seconds above 0")
    with contextlib.suppress(KeyboardInterrupt):  # the way out
        if not console.is_terminal:
            while True:
                console.print(tables(runs, claim))
                time.sleep(watch)
        with Live(tables(runs, claim), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(watch)
                live.update(tables(runs, claim), refresh=True)
    return 0


def tables(runs: Path, claim: str | None) -> RenderableType:
    """One table a planned claim run.

    Raises:
        ValueError: nothing was planned there.
    """
    plans = [path for path in sorted(runs.glob(f"*/*/{PLAN}")) if claim in (None, path.parts[-3])]
    if not plans:
        raise ValueError(
            f"{runs} holds no planned runs{f' of {claim}' if claim else ''}; `clozelab run CLAIM` plans them"
        )
    return Group(*(_table(path) for path in plans))


def _table(path: Path) -> RenderableType:
    try:
        plan = read_plan(path)
    except ValueError as error:  # of one claim; the others are shown
        return Text(str(error), style=_STYLES["failed"])
    seeds = sorted({seed for _, seed, _, _ in plan["cells"]})
    arms = list(dict.fromkeys(arm for arm, _, _, _ in plan["cells"]))
    states = {(arm, seed): cell_state(path.parent / folder, cell) for arm, seed, cell, folder in plan["cells"]}
    counts = {name: sum(state.state == name for state in states.values()) for name in _STYLES}
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    table = Table()
    table.add_column("arm")
    for seed in seeds:
        table.add_column(f"seed {seed}", justify="right")
    for arm in arms:
        table.add_row(arm, *(_cell(states.get((arm, seed))) for seed in seeds))
    head = Text(f"{plan['claim']} at scale {plan['scale']}: {said}", style="bold")  # a title would be broken to fit
    lines: list[RenderableType] = [head, table]
    for arm, seed, _, folder in plan["cells"]:
        state = states[arm, seed]
        if state.reason:
            again = ", goes on from its checkpoint" if (path.parent / folder / CHECKPOINT).exists() else ""
            text = f"  {arm} seed {seed}: {state.state}: {state.reason}{again if state.state == 'failed' else ''}"
            lines.append(Text(text, style=_STYLES[state.state]))
    return Group(*lines)


def _cell(state: CellState | None) -> Text:
    if state is None:
        return Text("")
    text = state.state
    if state.state in ("running", "silent"):
        text += f" {state.progress:.0%}"
        if state.tokens_per_second is not None:
            text += f" {state.tokens_per_second:,.0f} tok/s"
        if state.left is not None:
            text += f" {clock(state.left)} left"
    elif state.seconds is not None:
        text += f" {clock(state.seconds)}"
    return Text(text, style=_STYLES[state.state])


def clock(seconds: float) -> str:
    """1:05, or 2:03:04."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
