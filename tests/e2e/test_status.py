"""`clozelab status`: read from the directories alone, while a sweep runs and after everything was killed."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from clozelab.running import states
from clozelab.running.directories import say_running, started
from clozelab.running.job import write_failure
from clozelab.running.planning import PLAN
from clozelab.running.states import cell_state
from clozelab.running.status import tables
from tests.e2e.test_claim_run import clozelab, edit, heeding_ctrl_c, wait_for, workplace  # noqa: F401

CELL = "c" * 16


def record(status: str = "finished", cell: str = CELL) -> str:
    return json.dumps({"cell": cell, "status": status, "reason": "loss nan", "budgets": {"seconds": 65.0}})


def row(directory: Path, progress: float = 0.25) -> None:
    values = {"step": 3, "progress": progress, "tokens_per_second": 1234.0, "spent/seconds": 30.0}
    (directory / "metrics.jsonl").write_text(json.dumps(values) + "\n")


def says(directory: Path, **changes: Any) -> None:
    say_running(directory, {"cell": CELL})
    path = directory / "running.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("record.json", '{"cell": "c", "status": "finished", "budgets": null}'),
        ("running.json", '{"host": "here", "pid": null, "since": 1.0}'),
        ("running.json", ""),
        ("metrics.jsonl", '{"progress": null, "spent/seconds": "x"}\n'),
        ("failure.json", "[]"),
    ],
)
def test_a_broken_file_is_as_none(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert cell_state(tmp_path) == states.CellState("waiting")


def test_a_broken_record_leaves_its_seconds_open(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text('{"cell": "c", "status": "finished", "budgets": {}}')
    assert cell_state(tmp_path) == states.CellState("done", 1.0)


@pytest.mark.parametrize("text", ["", "{}", '{"claim": "bad", "scale": "smoke", "cells": [1]}'])
def test_a_broken_plan_hides_no_other(tmp_path: Path, text: str) -> None:
    for claim in ("bad", "good"):
        (tmp_path / claim / "smoke").mkdir(parents=True)
        plan = {"claim": claim, "scale": "smoke", "cells": [["arm", 0, CELL, "a"]]}
        (tmp_path / claim / "smoke" / PLAN).write_text(json.dumps(plan))
    (tmp_path / "bad/smoke" / PLAN).write_text(text)
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(tables(tmp_path, None))
    shown = console.export_text()
    assert f"{tmp_path / 'bad/smoke' / PLAN} is no plan that can be read" in shown
    assert "remove it" in shown
    assert "good at scale smoke: 1 waiting" in shown


@pytest.mark.parametrize("claim", ["/abs/claim", "*", "nothing"])
def test_a_claim_that_was_never_planned_is_named(tmp_path: Path, claim: str) -> None:
    with pytest.raises(ValueError, match=f"holds no planned runs of {re.escape(claim)}"):
        tables(tmp_path, claim)


def test_every_state_is_told_from_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cell_state(tmp_path / "nothing").state == "waiting"
    assert cell_state(tmp_path).state == "waiting"
    row(tmp_path)
    says(tmp_path)
    running = cell_state(tmp_path)
    assert (running.state, running.progress, running.tokens_per_second, running.left) == ("running", 0.25, 1234.0, 90.0)
    says(tmp_path, host="elsewhere")
    assert cell_state(tmp_path).state == "running"
    past = time.time() - states.SILENT_SECONDS - 5
    says(tmp_path, host="elsewhere", since=past)
    os.utime(tmp_path / "metrics.jsonl", (past, past))
    assert cell_state(tmp_path).state == "silent"
    write_failure(tmp_path, "failed", "a disk was full")
    assert (cell_state(tmp_path).state, cell_state(tmp_path).reason) == ("failed", "a disk was full")
    (tmp_path / "record.json").write_text(record("diverged"))
    assert (cell_state(tmp_path, CELL).state, cell_state(tmp_path, CELL).reason) == ("diverged", "loss nan")
    (tmp_path / "record.json").write_text(record())
    assert (cell_state(tmp_path, CELL).state, cell_state(tmp_path, CELL).seconds) == ("done", 65.0)
    assert cell_state(tmp_path, "d" * 16).state == "failed"  # the record is of another cell


def test_a_number_that_has_come_round_to_another_process_is_not_the_cell(tmp_path: Path) -> None:
    if started(os.getpid()) is None:
        pytest.skip("no /proc here")
    says(tmp_path)
    assert cell_state(tmp_path).state == "running"
    says(tmp_path, started=f"{(started(os.getpid()) or '').partition('/')[0]}/1")
    assert cell_state(tmp_path).state == "failed"
    assert "gone" in cell_state(tmp_path).reason


def test_a_cell_that_was_killed_is_gone_even_before_it_is_buried(tmp_path: Path) -> None:
    if started(os.getpid()) is None:
        pytest.skip("no /proc here")
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    says(tmp_path, pid=process.pid, started=started(process.pid), host=socket.gethostname())
    assert cell_state(tmp_path).state == "running"
    process.kill()
    wait_for(lambda: cell_state(tmp_path).state == "failed", 20)  # nobody has waited for it yet
    process.communicate()
    assert cell_state(tmp_path).state == "failed"


def test_a_record_that_is_written_just_now_is_no_error(tmp_path: Path) -> None:
    for torn in ("", "{", "[]", '{"cell": "', "{}"):
        (tmp_path / "record.json").write_text(torn)
        (tmp_path / "metrics.jsonl").write_text(torn)
        (tmp_path / "failure.json").write_text(torn)
        assert cell_state(tmp_path).state in ("waiting", "failed")


def test_no_plan_is_one_line(tmp_path: Path) -> None:
    done = clozelab(tmp_path, "status")
    assert done.returncode == 2
    assert "holds no planned runs" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert clozelab(tmp_path, "status", "--watch", "0").returncode == 2


def test_ten_seeds_are_told_whole_in_a_pipe(tmp_path: Path) -> None:
    folder = tmp_path / "runs/toy/smoke"
    cells = [["a long name of an arm", seed, CELL, f"s{seed}"] for seed in range(10)]
    for *_, name in cells:
        (folder / name).mkdir(parents=True)
        (folder / name / "record.json").write_text(record())
    (folder / PLAN).write_text(json.dumps({"claim": "toy", "scale": "smoke", "cells": cells}))
    done = clozelab(tmp_path, "status")
    assert done.returncode == 0
    assert done.stdout.count("done 1:05") == 10
    assert "10 done" in done.stdout


@pytest.mark.slow
def test_while_a_sweep_runs_after_a_kill_and_from_another_place(workplace: Path) -> None:  # noqa: F811
    edit(workplace, steps=3000)
    sweep = subprocess.Popen(
        [sys.executable, "-m", "clozelab.cli", "run", "toy", "--scale", "smoke", "--slots", "2"],
        cwd=workplace,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for(
            lambda: len([p for p in workplace.glob("runs/toy/smoke/*/metrics.jsonl") if p.stat().st_size]) == 2, 500
        )
        while_running = clozelab(workplace, "status")
        assert "2 running, 2 waiting" in while_running.stdout, while_running.stdout
        assert "tok/s" in while_running.stdout
        elsewhere = clozelab(workplace.parent, "status", "toy", "--runs-dir", str(workplace / "runs"))
        assert "2 running, 2 waiting" in elsewhere.stdout
        assert "0 item(s)" in clozelab(workplace, "clean").stdout
        watched = subprocess.Popen(
            [sys.executable, "-m", "clozelab.cli", "status", "--watch", "0.2"],
            cwd=workplace,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=heeding_ctrl_c,
        )
        assert watched.stdout is not None
        heads = [line for _ in range(40) if "at scale smoke" in (line := watched.stdout.readline())]
        assert len(heads) > 1  # drawn again
        watched.send_signal(signal.SIGINT)
        try:
            watched.communicate(timeout=30)
        finally:
            watched.kill()
        assert watched.returncode == 0
    finally:
        sweep.kill()
        sweep.wait()
    killed = wait_for(lambda: calm(workplace), 60)
    # Two ran when it was killed; the other two had ended before, or were never started.
    assert "2 failed" in killed
    assert "2 waiting" in killed or "2 done" in killed
    assert "its process is gone" in killed


def calm(workplace: Path) -> str:  # noqa: F811
    """What `status` says, once nothing runs any more."""
    said = clozelab(workplace, "status").stdout
    return "" if " running" in said else said
