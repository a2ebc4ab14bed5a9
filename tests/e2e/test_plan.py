"""The frozen plan: what a dry run shows, what an edit changes, and what it cannot change any more."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from clozelab import records
from clozelab.claims.schema import resolve_claim
from clozelab.running import commands
from clozelab.running.claim_run import Cell, Plan, locked, make_plan, prepare
from clozelab.running.forecast import forecast
from clozelab.running.job import write_failure
from clozelab.running.planning import PLAN, check_plan, write_plan
from tests.e2e.test_claim_run import clozelab, edit, results, workplace  # noqa: F401


@pytest.fixture
def here(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    monkeypatch.chdir(workplace)
    return workplace


def planned(seeds: int | None = None, *overrides: str) -> Plan:
    return make_plan(resolve_claim("toy"), "smoke", Path("runs"), seeds, list(overrides))


def freeze_all(plan: Plan) -> None:
    prepare(plan, 1)
    write_plan(plan)


def finish(cell: Cell, seconds: float = 90.0, code: str | None = None, status: Any = "finished") -> None:
    """The record that the cell would leave."""
    provenance = records.provenance() | ({"code": code} if code else {})
    budgets = dict.fromkeys(records.BUDGETS, 1000000000.0) | {"seconds": seconds}
    parameters = dict.fromkeys(records.PARAMETERS, 1)
    record = records.Record(
        "toy", cell.arm, cell.config["seed"], "smoke", status, cell.id, cell.config, provenance, budgets, parameters, {}
    )
    cell.directory.mkdir(parents=True, exist_ok=True)
    records.write_record(cell.directory / "record.json", record)


def shown(plan: Plan) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(forecast(plan))
    return console.export_text()


def line(text: str, start: str) -> str:
    (found,) = [one for one in text.splitlines() if start in one]
    return found


def test_a_dry_run_says_what_is_done_missing_failed_running_earlier_and_by_other_code(here: Path) -> None:
    plan = planned()
    assert "to run: 4 cells" in shown(plan)
    assert "?" in line(shown(plan), "moving seed 0")  # nobody knows how long before a first cell has run
    freeze_all(plan)
    moving0, still0, moving1, still1 = plan.cells
    assert [cell.arm for cell in plan.cells] == ["moving", "still"] * 2
    finish(still0)
    finish(moving0, code="0123456789abcdef")
    write_failure(still1.directory, "failed", "a disk was full")
    from clozelab.running.directories import say_running

    say_running(moving1.directory, {"cell": moving1.id})
    finish(Cell("moving", 7, "f" * 16, moving0.config, plan.directory / "moving-s7-ffffffff"))
    text = shown(plan)
    assert " done " in line(text, "still seed 0")
    assert "1:30" in line(text, "still seed 0")
    assert "done, by other code" in line(text, "moving seed 0")
    assert "by other code" not in line(text, "still seed 0")
    assert "failed" in line(text, "still seed 1")
    assert "about 1:30" in line(text, "still seed 1")
    assert "running" in line(text, "moving seed 1")
    assert "earlier, not used: moving-s7-ffffffff" in text
    assert "to run: 2 cells" in text
    assert "about 3:00 of training in all" in text


def test_a_dry_run_leaves_nothing_behind(here: Path) -> None:
    assert commands.run("toy", "smoke", None, None, [], dry_run=True) == 0
    assert not (here / "runs").exists()
    freeze_all(planned())
    before = {path: path.stat().st_mtime_ns for path in (here / "runs").rglob("*")}
    assert commands.run("toy", "smoke", None, None, [], dry_run=True, new_plan=True) == 0
    assert {path: path.stat().st_mtime_ns for path in (here / "runs").rglob("*")} == before


def test_an_edited_claim_is_refused_by_name_and_both_values(here: Path) -> None:
    plan = planned()
    freeze_all(plan)
    edit(here, lr="4e-3")
    with pytest.raises(ValueError, match=r"arm moving: optimizer\.lr was 0\.005, is 0\.004") as refused:
        commands.run("toy", "smoke", None, None, [])
    assert "--new-plan" in str(refused.value)
    edit(here, steps=13)
    with pytest.raises(ValueError, match=r"budget\.steps was 12, is 13"):
        check_plan(planned())
    edit(here)  # taken back
    check_plan(planned())


def test_more_seeds_extend_a_plan_and_fewer_take_nothing_away(here: Path) -> None:
    freeze_all(planned(1))
    assert len(json.loads((here / "runs/toy/smoke" / PLAN).read_text())["cells"]) == 2
    check_plan(planned(2))
    freeze_all(planned(2))
    freeze_all(planned(1))
    cells = json.loads((here / "runs/toy/smoke" / PLAN).read_text())["cells"]
    assert sorted((arm, seed) for arm, seed, _, _ in cells) == [
        *(("moving", 0), ("moving", 1)),
        *(("still", 0), ("still", 1)),
    ]


def test_a_new_plan_keeps_the_old_one_and_holds_only_its_own_cells(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freeze_all(planned())
    old = {cell.id for cell in planned().cells}
    edit(here, lr="4e-3")
    monkeypatch.setattr(commands, "run_sweep", lambda jobs, launcher, devices: [])
    commands.run("toy", "smoke", None, None, [], new_plan=True)
    now = {cell for _, _, cell, _ in json.loads((here / "runs/toy/smoke" / PLAN).read_text())["cells"]}
    assert now == {cell.id for cell in planned().cells} != old
    (kept,) = (here / "runs/toy/smoke").glob("plan-*.json")
    assert {cell for _, _, cell, _ in json.loads(kept.read_text())["cells"]} == old


def test_a_new_plan_of_finished_cells_is_written_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It once put the old plan aside and left none: `status` then knew of nothing."""
    freeze_all(planned(1))
    for cell in planned().cells:
        finish(cell)
    monkeypatch.setattr(commands, "present", lambda *_: None)
    commands.run("toy", "smoke", None, None, [], new_plan=True)
    assert len(json.loads((here / "runs/toy/smoke" / PLAN).read_text())["cells"]) == 4
    assert len(list((here / "runs/toy/smoke").glob("plan-*.json"))) == 1


def test_a_new_plan_waits_for_no_sweep_that_runs_and_takes_nothing_from_it(here: Path) -> None:
    plan = planned()
    freeze_all(plan)
    before = (plan.directory / PLAN).read_bytes()
    with locked(plan), pytest.raises(ValueError, match="in use by another"):
        commands.run("toy", "smoke", None, None, [], new_plan=True)
    assert (plan.directory / PLAN).read_bytes() == before
    assert not list(plan.directory.glob("plan-*.json"))


def test_a_corpus_that_has_changed_is_said(here: Path) -> None:
    texts = here / "texts"
    texts.mkdir()
    (texts / "one.txt").write_text("A sentence of some words. Another one of them.\n\n" * 50)
    overrides = ("corpus=text", f"corpus.paths=[{texts}/one.txt]", "tokenizer.vocab_size=300")
    claim = yaml.safe_load((here / "experiments/toy/claim.yaml").read_text())
    level = claim["scales"]["smoke"]
    level["overrides"] = [one for one in level["overrides"] if not one.startswith(("corpus.", "tokenizer."))]
    (here / "experiments/toy/claim.yaml").write_text(yaml.safe_dump(claim))
    plan = planned(None, *overrides)
    for cell in plan.cells:
        from clozelab.running.directories import freeze

        freeze(cell.directory, cell.config)
    write_plan(plan)
    check_plan(planned(None, *overrides))
    (texts / "one.txt").write_text("Quite another text.\n" * 50)
    with pytest.raises(ValueError, match=r"arm \w+: the corpus, its tokenizer, or the code"):
        check_plan(planned(None, *overrides))


@pytest.mark.slow
def test_what_is_edited_while_a_plan_runs_changes_nothing_in_it(here: Path) -> None:
    """The cells have their frozen configurations; the next start of the sweep sees the edit, and refuses."""
    first = clozelab(here, "run", "toy", "--scale", "smoke")
    assert first.returncode == 0, first.stderr
    calm = results(here)
    (here / "runs").rename(here / "calm")
    plan = planned()
    freeze_all(plan)
    edit(here, lr="1.0", steps=3)
    from clozelab.running.pool import run_jobs

    assert not [outcome for outcome in run_jobs([cell.job for cell in plan.cells], 2, warm=True) if outcome.failed]
    assert results(here) == calm
    refused = clozelab(here, "run", "toy", "--scale", "smoke")
    assert refused.returncode == 2
    assert "optimizer.lr was 0.005, is 1.0" in refused.stderr
