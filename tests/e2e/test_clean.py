"""`clozelab clean`: shows first; nothing outside the run tree, nothing of a cell that runs."""

import json
from pathlib import Path

import pytest
from filelock import FileLock

from clozelab.running.cleaning import _remove, clean, removable
from clozelab.running.directories import say_running
from clozelab.running.planning import PLAN
from tests.e2e.test_claim_run import clozelab, snapshot, workplace  # noqa: F401

CELL = "c" * 16


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A claim with a cell that is done, one that runs, one that was killed, two of an earlier plan; a `train` run."""
    folder = tmp_path / "runs/toy/smoke"
    for name in ("done", "running", "killed", "earlier", "earlier-running"):
        make(folder / name)
    make(tmp_path / "runs/train/alone")
    for path in (folder / "done", tmp_path / "runs/train/alone", folder / "earlier"):
        record = {"cell": CELL, "status": "finished", "budgets": {"seconds": 1.0}}
        (path / "record.json").write_text(json.dumps(record))
    for name in ("running", "earlier-running"):
        say_running(folder / name, {"cell": CELL})
    (folder / "killed/checkpoints/last.part").write_bytes(b"x" * 50)
    (folder / "killed/checkpoints/last.20260101-000000.ckpt").write_bytes(b"x" * 60)
    (folder / "killed/config.yaml.part").write_bytes(b"x" * 5)
    cells = [["arm", seed, CELL, name] for seed, name in enumerate(("done", "running", "killed"))]
    (folder / PLAN).write_text(json.dumps({"claim": "toy", "scale": "smoke", "cells": cells}))
    return tmp_path / "runs"


def make(directory: Path) -> None:
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "checkpoints/last.ckpt").write_bytes(b"x" * 1000)
    (directory / "config.yaml").write_text("seed: 0\n")


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != ".lock"}


EXPECTED = {
    ("checkpoints", "toy/smoke/done/checkpoints"),
    ("checkpoints", "train/alone/checkpoints"),
    ("earlier", "toy/smoke/earlier"),
    ("leftovers", "toy/smoke/killed/checkpoints/last.part"),
    ("leftovers", "toy/smoke/killed/checkpoints/last.20260101-000000.ckpt"),
    ("leftovers", "toy/smoke/killed/config.yaml.part"),
}


def test_what_can_go_is_shown_and_only_then_removed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(runs)
    assert {(one.kind, str(one.path.relative_to(runs))) for one in removable(runs, None)} == EXPECTED
    clean(runs, None, [], yes=False)
    told = capsys.readouterr().out
    assert files(runs) == before
    assert "6 item(s)" in told
    assert "add --yes" in told
    for _, path in EXPECTED:
        assert any(line.endswith(str(runs / path)) for line in told.splitlines())  # whole, on one line
    clean(runs, None, [], yes=True)
    gone = {path for _, path in EXPECTED}
    assert files(runs) == {path for path in before if not any(f"{path}/".startswith(f"{one}/") for one in gone)}
    assert (runs / "toy/smoke/killed/checkpoints/last.ckpt").exists()  # it goes on from this
    assert not list(removable(runs, None))


def test_files_of_others_and_records_that_cannot_be_read_stay(runs: Path) -> None:
    (runs / "train/alone/mydata.part").write_bytes(b"x")
    (runs / "train/alone/.record.json.abc").write_bytes(b"x")
    (runs / "toy/smoke/done/record.json").write_text('{"cell": "half')
    found = {(one.kind, str(one.path.relative_to(runs))) for one in removable(runs, None)}
    expected = {one for one in EXPECTED if one[1] != "toy/smoke/done/checkpoints"}
    assert found == expected | {("leftovers", "train/alone/.record.json.abc")}


@pytest.mark.parametrize("plan", ["", "{}", '{"claim": "toy", "scale": "smoke", "cells": [1]}'])
def test_a_plan_that_cannot_be_read_holds_every_cell(runs: Path, plan: str) -> None:
    (runs / "toy/smoke" / PLAN).write_text(plan)
    assert not [one for one in removable(runs, None) if one.kind == "earlier"]


def test_a_cell_that_was_planned_since_stays(runs: Path) -> None:
    (one,) = [one for one in removable(runs, None) if one.kind == "earlier"]
    with FileLock(runs / "toy/smoke/.lock"):
        assert not _remove(one)  # another run plans
    plan = json.loads((runs / "toy/smoke" / PLAN).read_text())
    plan["cells"].append(["arm", 9, CELL, "earlier"])
    (runs / "toy/smoke" / PLAN).write_text(json.dumps(plan))
    assert not _remove(one)
    assert one.path.exists()


def test_kinds_and_claims_are_chosen(runs: Path) -> None:
    clean(runs, "toy", ["checkpoints"], yes=True)
    assert (runs / "train/alone/checkpoints").exists()
    assert (runs / "toy/smoke/earlier").exists()
    assert not (runs / "toy/smoke/done/checkpoints").exists()
    assert (runs / "toy/smoke/done/record.json").exists()
    with pytest.raises(ValueError, match="nothing called everything to clean; give checkpoints"):
        clean(runs, None, ["everything"], yes=True)
    with pytest.raises(ValueError, match="no run tree"):
        clean(runs / "nowhere", None, [], yes=True)


def test_a_symbolic_link_is_neither_followed_nor_removed(runs: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "smoke").mkdir(parents=True)
    make(outside / "smoke/mine")
    (outside / "smoke/mine/record.json").write_text((runs / "toy/smoke/done/record.json").read_text())
    (outside / "smoke" / PLAN).write_text('{"claim": "x", "scale": "smoke", "cells": []}')
    (runs / "linked").symlink_to(outside)
    (runs / "toy/other").symlink_to(outside / "smoke")
    (runs / "toy/smoke/linked-cell").symlink_to(outside / "smoke/mine")
    kept = runs / "toy/smoke/done/checkpoints"
    kept.rename(tmp_path / "elsewhere")
    kept.symlink_to(tmp_path / "elsewhere")
    before = files(outside) | files(tmp_path / "elsewhere")
    clean(runs, None, [], yes=True)
    assert files(outside) | files(tmp_path / "elsewhere") == before
    assert kept.is_symlink()
    assert (runs / "linked").is_symlink()


def test_a_cell_that_starts_meanwhile_is_kept(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FileLock(runs / "toy/smoke/earlier/.lock"):
        clean(runs, None, ["earlier"], yes=True)
    assert (runs / "toy/smoke/earlier/checkpoints/last.ckpt").exists()
    assert "its cell runs again" in capsys.readouterr().out


@pytest.mark.slow
def test_after_cleaning_nothing_runs_again_and_the_claim_is_judged_as_before(workplace: Path) -> None:  # noqa: F811
    first = clozelab(workplace, "run", "toy", "--scale", "smoke")
    assert first.returncode == 0, first.stderr
    before = snapshot(workplace)
    cleaned = clozelab(workplace, "clean", "--yes")
    assert "4 item(s)" in cleaned.stdout, cleaned.stdout
    assert not list(workplace.glob("runs/**/*.ckpt"))
    again = clozelab(workplace, "run", "toy", "--scale", "smoke")
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert "4 done, 0 to run" in again.stderr
    assert snapshot(workplace) == before
    assert clozelab(workplace, "publish", "toy", "--scale", "smoke").returncode == 0
    assert clozelab(workplace, "verdict", "toy").returncode == 0
    assert "0 item(s)" in clozelab(workplace, "clean").stdout
