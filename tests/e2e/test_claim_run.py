"""A claim from its yaml to its verdict, and what interrupts it on the way."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from clozelab.running.directories import started
from tests.e2e.conftest import TINY

T = TypeVar("T")

CLAIM = {
    "id": "toy",
    "title": "Two learning rates",
    "says": "A learning rate of nothing learns nothing.",
    "sources": [{"paper": "none", "arxiv": "0000.00000", "year": 2026, "where": "a test"}],
    "arms": {"still": {"overrides": ["optimizer.lr=1e-12"]}, "moving": {"overrides": ["optimizer.lr=5e-3"]}},
    "control": "still",
    "varies": ["optimizer.lr"],
    "matched": {"steps": 0.0},
    "predictions": [
        {
            "id": "learns",
            "says": "The moving arm has the lower loss.",
            "metric": "heldout_mlm.loss",
            "relation": "moving < still",
            "basis": "arithmetic",
        }
    ],
    "seeds": [0, 1, 2],
    "scales": {"smoke": {"overrides": TINY, "seeds": 2, "says": "seconds", "expected_time": "seconds"}},
}


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    folder = tmp_path / "experiments" / "toy"
    folder.mkdir(parents=True)
    (folder / "claim.yaml").write_text(yaml.safe_dump(CLAIM))
    return tmp_path


def clozelab(workplace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clozelab.cli", *arguments], cwd=workplace, capture_output=True, text=True, check=False
    )


def snapshot(workplace: Path) -> dict[str, bytes]:
    return {str(p.parent.name): p.read_bytes() for p in sorted(workplace.glob("runs/toy/smoke/*/record.json"))}


def strict(record: dict[str, Any]) -> dict[str, Any]:
    """What of a record must not depend on where, when and after how many kills its cell ran."""
    budgets = {key: value for key, value in record["budgets"].items() if key != "seconds"}
    kept = {key: record[key] for key in ("cell", "status", "metrics", "parameters")}
    return kept | {"budgets": budgets, "scores": (record["scores"] or {}).get("sha256")}


def results(workplace: Path, runs: str = "runs") -> dict[str, dict[str, Any]]:
    """Directory name -> what must be equal."""
    found = sorted(workplace.glob(f"{runs}/toy/smoke/*/record.json"))
    return {path.parent.name: strict(json.loads(path.read_text())) for path in found}


@pytest.mark.slow
def test_run_twice_publish_and_judge_again(workplace: Path) -> None:
    first = clozelab(workplace, "run", "toy", "--scale", "smoke")
    assert first.returncode == 0, first.stderr
    before = snapshot(workplace)
    assert len(before) == 4
    again = clozelab(workplace, "run", "toy", "--scale", "smoke")
    assert again.returncode == 0
    assert "4 done, 0 to run" in again.stderr
    assert again.stdout == first.stdout
    assert snapshot(workplace) == before

    published = clozelab(workplace, "publish", "toy", "--scale", "smoke")
    assert published.returncode == 0, published.stderr
    evidence = workplace / "experiments/toy/evidence/smoke.jsonl"
    assert len(evidence.read_text().splitlines()) == 4
    assert "0 record(s) added" in clozelab(workplace, "publish", "toy", "--scale", "smoke").stdout
    verdict = clozelab(workplace, "verdict", "toy")
    assert verdict.returncode == 0
    assert "moving < still" in verdict.stdout
    assert "generated from something else" not in verdict.stdout
    assert "toy" in clozelab(workplace, "claims").stdout


@pytest.mark.slow
def test_killed_halfway_only_the_missing_cells_run(workplace: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "clozelab.cli", "run", "toy", "--scale", "smoke", "--slots", "1"],
        cwd=workplace,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 500
    while len(snapshot(workplace)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = snapshot(workplace)
    assert 2 <= len(before) < 4
    times = {p: p.stat().st_mtime_ns for p in workplace.glob("runs/toy/smoke/*/record.json")}
    done = clozelab(workplace, "run", "toy", "--scale", "smoke")
    assert done.returncode == 0, done.stderr
    assert f"{len(before)} done, {4 - len(before)} to run" in done.stderr
    after = snapshot(workplace)
    assert len(after) == 4
    assert {name: after[name] for name in before} == before
    assert {p: p.stat().st_mtime_ns for p in times} == times


@pytest.mark.slow
def test_a_failing_cell_is_named_and_stops_no_other(workplace: Path) -> None:
    assert clozelab(workplace, "run", "toy", "--scale", "smoke", "--dry-run").returncode == 0
    assert not list(workplace.glob("runs/toy/smoke/*/config.yaml"))
    code = (
        "import sys, clozelab.running.claim_run as r, clozelab.running.commands as c\n"
        "prepare = r.prepare\n"
        "def sabotage(plan, slots):\n"
        "    prepare(plan, slots)\n"
        "    cell = plan.cells[1]\n"
        "    (cell.directory / 'config.yaml').write_text('not: a config')\n"
        "c.prepare = sabotage\n"
        "from clozelab.cli import main\n"
        "sys.exit(main(['run', 'toy', '--scale', 'smoke']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=workplace, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "1 of 4 failed" in done.stderr
    assert "moving seed 0" in done.stderr
    assert len(snapshot(workplace)) == 3
    assert "inconclusive" in done.stdout.lower()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_cells_with_checkpoints_and_the_next_run_goes_on(
    workplace: Path, number: int, code: int
) -> None:
    edit(workplace, steps=400)
    process = subprocess.Popen(
        [sys.executable, "-m", "clozelab.cli", "run", "toy", "--scale", "smoke", "--slots", "2"],
        cwd=workplace,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heeding_ctrl_c,
    )
    training = wait_for(lambda: [p for p in workplace.glob("runs/toy/smoke/*/metrics.jsonl") if p.stat().st_size], 500)
    running = [json.loads((path.parent / "running.json").read_text()) for path in training]
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == code, told
    assert "interrupted: 0 of 4" in told
    assert "Traceback" not in told
    assert not [one for one in running if started(one["pid"]) == one["started"]]
    for path in training:
        assert (path.parent / "checkpoints/last.ckpt").exists()
        assert json.loads((path.parent / "failure.json").read_text())["status"] == "killed"
    assert not results(workplace)
    done = clozelab(workplace, "run", "toy", "--scale", "smoke", "--slots", "2")
    assert done.returncode == 0, done.stderr
    for path in training:
        assert "resumed_at_step" in json.loads((path.parent / "record.json").read_text())["provenance"]


def edit(workplace: Path, steps: int | None = None, lr: str | None = None) -> None:
    """Write the claim with a few things changed."""
    claim = json.loads(json.dumps(CLAIM))
    if steps is not None:
        claim["scales"]["smoke"]["overrides"].append(f"budget.steps={steps}")
    if lr is not None:
        claim["arms"]["moving"]["overrides"] = [f"optimizer.lr={lr}"]
    (workplace / "experiments/toy/claim.yaml").write_text(yaml.safe_dump(claim))


def heeding_ctrl_c() -> None:
    """In a child: as from a terminal, though the tests may run in the background, where shells have Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(found: Callable[[], T], seconds: float) -> T:
    """The first true answer."""
    deadline = time.monotonic() + seconds
    while not (answer := found()):
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.1)
    return answer


@pytest.mark.slow
def test_half_a_minute_of_chaos(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("finds whom to kill in /proc")
    script = Path(__file__).parents[2] / "scripts/chaos.py"
    command = [sys.executable, str(script), "--minutes", "0.5", "--steps", "200", "--keep", str(tmp_path / "chaos")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 records equal" in done.stdout


def test_an_undeclared_difference_is_refused_before_anything_runs(workplace: Path) -> None:
    claim = json.loads(json.dumps(CLAIM))
    claim["arms"]["moving"]["overrides"].append("batch_size=4")
    (workplace / "experiments/toy/claim.yaml").write_text(yaml.safe_dump(claim))
    done = clozelab(workplace, "run", "toy", "--scale", "smoke")
    assert done.returncode == 2
    assert "batch_size" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (workplace / "runs").exists()


def test_an_override_of_what_tells_the_arms_apart_is_refused(workplace: Path) -> None:
    done = clozelab(workplace, "run", "toy", "--scale", "smoke", "optimizer.lr=1e-3")
    assert done.returncode == 2
    assert "optimizer.lr" in done.stderr
    assert clozelab(workplace, "run", "toy", "--scale", "smoke", "optimizer=adamw").returncode == 2
    assert clozelab(workplace, "run", "toy", "--scale", "smoke", "seed=3").returncode == 2


def test_a_run_with_overrides_is_kept_apart(workplace: Path) -> None:
    done = clozelab(workplace, "run", "toy", "--dry-run", "--scale", "smoke", "model.layers=2")
    assert done.returncode == 0, done.stderr
    assert "runs/toy/smoke+" in done.stderr


def test_a_runs_folder_that_is_a_file_is_one_line(workplace: Path) -> None:
    (workplace / "taken").write_text("")
    done = clozelab(workplace, "run", "toy", "--scale", "smoke", "--runs-dir", "taken/here")
    assert done.returncode == 2
    assert len([line for line in done.stderr.splitlines() if line.startswith("clozelab: ")]) == 1
    assert "Traceback" not in done.stderr


def test_a_broken_claim_hides_no_other(workplace: Path) -> None:
    (workplace / "experiments/odd").mkdir()
    (workplace / "experiments/odd/claim.yaml").write_text("id: odd\n")
    done = clozelab(workplace, "claims")
    assert done.returncode == 0
    assert "\ntoy\n" in "\n" + done.stdout
    assert "unreadable" in done.stdout
    assert "odd/claim.yaml" in done.stdout


@pytest.mark.slow
def test_what_nohup_ignores_ends_no_sweep(workplace: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "clozelab.cli", "run", "toy", "--scale", "smoke", "--seeds", "1"],
        cwd=workplace,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN) and None,
    )
    wait_for(lambda: list(workplace.glob("runs/toy/smoke/*/running.json")), 500)
    process.send_signal(signal.SIGHUP)
    _, told = process.communicate(timeout=500)
    assert process.returncode == 0, told
    assert len(results(workplace)) == 2
