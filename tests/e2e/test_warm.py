"""The warm process and its forks: nothing hangs, nothing is left, and a forked cell is as a fresh one."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from clozelab.running.directories import started
from clozelab.running.job import Job, Outcome
from clozelab.running.pool import Silent, run_jobs
from clozelab.running.warm import WarmSlot, needed_by
from tests.e2e.test_claim_run import strict

ROOT = Path(__file__).parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_what_cells_need_is_read_from_their_configurations(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "tracker:\n  _target_: clozelab.tracking.wandb.WandbTracker\ncorpus:\n  _target_: mine.Corpus\n"
    )
    needed = needed_by([tmp_path, tmp_path / "nothing there"])
    assert {"mine", "wandb", "clozelab.tracking.wandb"} <= set(needed)
    (tmp_path / "config.yaml").write_text("tracker:\n  _target_: clozelab.tracking.wandb.NoTracker\n")
    assert needed_by([tmp_path]) == ["clozelab.tracking.wandb"]


class Answers(WarmSlot):
    """A slot whose warm process is a script of the test's own."""

    def __init__(self, script: str) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._read, self._ready, self.pid = b"", False, self._server.pid


def test_a_cell_that_ends_at_once_is_heard_of() -> None:
    """Both answers come in one piece: the second must not wait in a buffer that nobody looks into."""
    slot = Answers(
        """
        import sys
        print('{"threads": 1}', flush=True)
        sys.stdin.readline()
        print('{"pid": 4194305}\\n{"code": 3, "seconds": 0.5}', flush=True)
        sys.stdin.readline()
        """
    )
    try:
        process = slot.start(Path("nowhere"), {}, threading.Event())
        deadline = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < deadline:
            pass
        assert (process.poll(), process.seconds) == (3, 0.5)
    finally:
        slot.close()


@pytest.mark.parametrize("script", ["raise SystemExit", "print('{\"threads\": 2}', flush=True); input()"])
def test_a_warm_process_that_cannot_fork_is_an_error_that_the_pool_knows(script: str) -> None:
    slot = Answers(script)
    try:
        with pytest.raises(OSError, match="warm process"):
            slot.start(Path("nowhere"), {}, threading.Event())
    finally:
        slot.close()


def test_a_stop_is_not_kept_waiting_by_an_import() -> None:
    slot, stop = Answers("import time; time.sleep(600)"), threading.Event()
    stop.set()
    try:
        with pytest.raises(OSError, match="warm process"):
            slot.start(Path("nowhere"), {}, stop)
    finally:
        slot.close()
    assert slot.gone


class Noted(Silent):
    """Ends the warm process when the first cell has ended, if it is to."""

    def __init__(self, kills: bool) -> None:
        self.kills = kills
        self.slots: list[WarmSlot] = []
        self.threads: list[int] = []

    def end(self, outcome: Outcome) -> None:
        """The first time, kill."""
        while self.kills and self.slots:
            os.kill(self.slots.pop().pid, signal.SIGKILL)


@linux
@pytest.mark.slow
def test_cells_of_a_warm_process_are_as_fresh_ones_and_survive_its_death(
    make_cell: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from clozelab.running.compose import prepare_data

    names = {warm: [f"{warm}-{seed}" for seed in range(3)] for warm in ("cold", "warm", "killed")}
    cells = {n: make_cell(n, f"seed={n[-1]}") for ns in names.values() for n in ns}
    prepare_data([yaml.safe_load((cells["cold-0"] / "config.yaml").read_text())])
    start = WarmSlot.start

    def noted(slot: WarmSlot, *arguments: Any) -> Any:
        process = start(slot, *arguments)
        follow.slots.append(slot)
        follow.threads.append(len(os.listdir(f"/proc/{slot.pid}/task")))
        return process

    monkeypatch.setattr(WarmSlot, "start", noted)
    results = {}
    for kind in names:
        follow = Noted(kills=kind == "killed")
        outcomes = run_jobs([Job(n, cells[n]) for n in names[kind]], 1, warm=kind != "cold", follow=follow)
        assert len(outcomes) == 3
        assert not [outcome.reason for outcome in outcomes if outcome.failed]
        assert len(follow.threads) == {"cold": 0, "warm": 3, "killed": 1}[kind]
        assert set(follow.threads) <= {1}
        results[kind] = [strict(json.loads((cells[n] / "record.json").read_text())) for n in names[kind]]
    assert results["warm"] == results["cold"] == results["killed"]


@linux
@pytest.mark.slow
def test_the_warm_process_ends_with_its_pool_and_its_cell_with_both(make_cell: Callable[..., Path]) -> None:
    cell = make_cell("cell", "budget.steps=100000")
    code = (
        "import sys, threading, time\nfrom pathlib import Path\n"
        "from clozelab.running.supervise import environment_of\nfrom clozelab.running.warm import WarmSlot\n"
        "slot = WarmSlot(environment_of(1))\n"
        "process = slot.start(Path(sys.argv[1]), environment_of(1), threading.Event())\n"
        "print(slot.pid, process.pid, flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(cell)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        owner.kill()
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if running(pid)]


def running(pid: int) -> bool:
    return started(pid) is not None


@linux
@pytest.mark.slow
def test_a_hundred_cells_leave_the_pool_as_it_was(tmp_path: Path) -> None:
    """Fewer here; the benchmark has a hundred. Bounds are generous: only a leak or a lost fork breaks them."""
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/many_cells.py", "--cells", "24", "--cold", "0", "--steps", "12"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout.splitlines()[-1])
    assert numbers["warm_growth_mib"] < 8
    # The end of a fork once took three times as long as the cell: every page of the warm process was copied.
    assert numbers["own_seconds"] < 3 * numbers["trained_and_measured_seconds"] + 2
