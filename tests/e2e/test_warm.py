"""The warm process and its forks: nothing hangs, nothing is left, and a forked cell is as a fresh one."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from clozelab.running import warm
from clozelab.running.directories import started
from clozelab.running.job import Job, Limits, Outcome
from clozelab.running.pool import Silent, run_jobs
from clozelab.running.supervise import environment_of
from clozelab.running.warm import WarmServer, needed_by
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


class Answers(WarmServer):
    """A warm process that is a script of the test's own."""

    def __init__(self, script: str) -> None:
        self.script = textwrap.dedent(script)
        super().__init__(os.environ)

    def _command(self, modules: Iterable[str]) -> list[str]:
        return [sys.executable, "-c", self.script]


def test_a_fork_that_fails_is_one_cells_own_matter(tmp_path: Path) -> None:
    script = """
        import sys
        from clozelab.running.warm import _Server
        import clozelab.running.warm as warm, os
        fork, forks = os.fork, []
        def failing():
            forks.append(1)
            if len(forks) == 2:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            pid = fork()
            if pid == 0:
                import time
                time.sleep(60)
            return pid
        os.fork, warm._WARM = failing, ()
        _Server().serve([])
        """
    with closing(Answers(script)) as server:
        first = server.start(tmp_path, {}, threading.Event())
        with pytest.raises(OSError, match=r"could not fork: .*temporarily unavailable"):
            server.start(tmp_path, {}, threading.Event())
        assert first.poll() is None
        assert not server.gone
        third = server.start(tmp_path, {}, threading.Event())
        assert first.poll() is third.poll() is None


def test_a_warm_process_that_hangs_keeps_no_pool_from_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_DEATH_SECONDS", 0.2)
    stop = threading.Event()
    stop.set()
    with closing(Answers("import time; print('{\"threads\": 1}', flush=True); time.sleep(600)")) as server:
        assert server._imported.wait(30)
        with pytest.raises(OSError, match="the warm process has ended"):
            server.start(tmp_path, {}, stop)
        assert server.gone


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    jobs = [Job(name, tmp_path / name) for name in "ab"]
    for job in jobs:
        (job.directory / "output.log").mkdir(parents=True)
    outcomes = run_jobs(jobs, 1, warm=True)
    assert [outcome.failed for outcome in outcomes] == [True, True]
    for outcome in outcomes:
        assert str(outcome.job.directory / "output.log") in outcome.reason


def test_a_cell_that_ends_at_once_is_heard_of() -> None:
    """Both answers come in one piece."""
    script = """
        import sys
        print('{"threads": 1}', flush=True)
        sys.stdin.readline()
        print('{"pid": 4194305}\\n{"pid": 4194305, "code": 3, "seconds": 0.5}', flush=True)
        sys.stdin.readline()
        """
    with closing(Answers(script)) as server:
        process = server.start(Path("nowhere"), {}, threading.Event())
        assert (process.wait(20), process.poll(), process.seconds) == (3, 3, 0.5)


def test_each_cell_hears_of_its_own_end() -> None:
    script = """
        import sys
        print('{"threads": 1}', flush=True)
        for pid in (4194305, 4194306):
            sys.stdin.readline()
            print('{"pid": %d}' % pid, flush=True)
        print('{"pid": 4194306, "code": -9, "seconds": 0.5}', flush=True)
        sys.stdin.readline()
        """
    with closing(Answers(script)) as server:
        first, second = (server.start(Path(name), {}, threading.Event()) for name in ("a", "b"))
        assert second.wait(20) == -signal.SIGKILL
        with pytest.raises(subprocess.TimeoutExpired):
            first.wait(0)
        assert first.poll() is None
    assert first.poll() == -signal.SIGKILL  # with the process that forked it


@pytest.mark.parametrize(
    "script",
    ["raise SystemExit", "print('{\"threads\": 2}', flush=True); input()", "print('hello', flush=True); input()"],
)
def test_a_warm_process_that_cannot_fork_is_an_error_that_the_pool_knows(script: str) -> None:
    with closing(Answers(script)) as server:
        for _ in range(2):  # each slot hears of it
            with pytest.raises(OSError, match="warm process"):
                server.start(Path("nowhere"), {}, threading.Event())
        assert server.gone


def test_a_stop_is_not_kept_waiting_by_an_import() -> None:
    stop = threading.Event()
    stop.set()
    with closing(Answers("import time; time.sleep(600)")) as server, pytest.raises(OSError, match="warm process"):
        server.start(Path("nowhere"), {}, stop)
    assert server.gone


class Noted(Silent):
    """Ends the warm process when the first cell has ended, if it is to."""

    def __init__(self, kills: bool) -> None:
        self.kills = kills
        self.servers: list[WarmServer] = []
        self.threads: list[int] = []

    def end(self, outcome: Outcome) -> None:
        """The first time, kill."""
        if self.kills:
            os.kill(self.servers[0].pid, signal.SIGKILL)
            self.kills = False


@linux
@pytest.mark.slow
def test_cells_of_a_warm_process_are_as_fresh_ones_and_survive_its_death(
    make_cell: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from clozelab.running.compose import prepare_data

    names = {warm: [f"{warm}-{seed}" for seed in range(4)] for warm in ("cold", "warm", "killed")}
    cells = {n: make_cell(n, f"seed={n[-1]}") for ns in names.values() for n in ns}
    prepare_data([yaml.safe_load((cells["cold-0"] / "config.yaml").read_text())])
    start = WarmServer.start

    def noted(server: WarmServer, *arguments: Any) -> Any:
        process = start(server, *arguments)
        follow.servers.append(server)
        follow.threads.append(len(os.listdir(f"/proc/{server.pid}/task")))
        return process

    monkeypatch.setattr(WarmServer, "start", noted)
    results = {}
    for kind in names:
        follow = Noted(kills=kind == "killed")
        jobs = [Job(n, cells[n]) for n in names[kind]]
        # A cell that runs when the warm process is killed ends with it, and is tried again.
        outcomes = run_jobs(jobs, 2, limits=Limits(retries=1), warm=kind != "cold", follow=follow)
        assert len(outcomes) == 4
        assert not [outcome.reason for outcome in outcomes if outcome.failed]
        assert len({server.pid for server in follow.servers}) == (kind != "cold")
        assert len(follow.threads) in {"cold": [0], "warm": [4], "killed": [2, 3, 4]}[kind]
        assert set(follow.threads) <= {1}
        results[kind] = [strict(json.loads((cells[n] / "record.json").read_text())) for n in names[kind]]
    assert results["warm"] == results["cold"] == results["killed"]


@linux
@pytest.mark.slow
def test_the_warm_process_ends_with_its_pool_and_its_cells_with_both(make_cell: Callable[..., Path]) -> None:
    cells = [str(make_cell(name, "budget.steps=100000")) for name in "ab"]
    code = (
        "import sys, threading, time\nfrom pathlib import Path\n"
        "from clozelab.running.supervise import environment_of\nfrom clozelab.running.warm import WarmServer\n"
        "server = WarmServer(environment_of(1))\n"
        "processes = [server.start(Path(cell), environment_of(1), threading.Event()) for cell in sys.argv[1:]]\n"
        "print(server.pid, *(process.pid for process in processes), flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, *cells], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 3
        assert all(running(pid) for pid in pids)
        owner.kill()
    deadline = time.monotonic() + 30
    while any(running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if running(pid)]


CELL = """
import json, os, signal, sys, time
import clozelab.training.cell

def main(folder):
    print("heard")
    told = {
        "slot": os.environ["SLOT"],
        "home": os.environ.get("HOME"),
        "leads": os.getsid(0) == os.getpid(),
        "files": sorted(os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if name in "012"),
        "pipes": [name for name in os.listdir("/proc/self/fd")
                  if os.path.exists(f"/proc/self/fd/{name}") and "pipe" in os.readlink(f"/proc/self/fd/{name}")],
        "children": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL and signal.set_wakeup_fd(-1) == -1,
    }
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.01)
    with open(f"{folder}/told.json", "w") as file:
        json.dump(told, file)
    return len(os.environ["SLOT"])

print("what an import prints is no answer")
clozelab.training.cell.main = main
"""


@linux
@pytest.mark.slow
def test_cells_run_beside_each_other_each_as_its_slot_wants(tmp_path: Path) -> None:
    (tmp_path / "other_cell.py").write_text(CELL)
    directories = [tmp_path / name for name in "ab"]
    for directory in directories:
        directory.mkdir()
    with closing(WarmServer(os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}, ["other_cell"])) as server:
        first, second = (
            server.start(directory, {"SLOT": "x" * code}, threading.Event())
            for code, directory in enumerate(directories, 3)
        )
        (directories[1] / "go").touch()
        assert second.wait(60) == 4
        assert first.poll() is None
        (directories[0] / "go").touch()
        assert first.wait(60) == 3
    for slot, directory in zip(("xxx", "xxxx"), directories, strict=True):
        assert json.loads((directory / "told.json").read_text()) == {
            "slot": slot,
            "home": None,
            "leads": True,
            "files": ["/dev/null", str(directory / "output.log"), str(directory / "output.log")],
            "pipes": [],
            "children": True,
        }
        assert (directory / "output.log").read_text() == "heard\n"


@linux
@pytest.mark.slow
def test_what_runs_ends_when_the_warm_process_is_killed(make_cell: Callable[..., Path]) -> None:
    cells = [make_cell(name, "budget.steps=100000") for name in "ab"]
    with closing(WarmServer(environment_of(1))) as server:
        processes = [server.start(cell, environment_of(1), threading.Event()) for cell in cells]
        assert len({os.getsid(process.pid) for process in processes}) == 2
        os.kill(server.pid, signal.SIGKILL)
        assert [process.wait(30) for process in processes] == [-signal.SIGKILL] * 2
        # At once: another attempt would find the directory in use.
        assert not [process.pid for process in processes if running(process.pid)]
        with pytest.raises(OSError, match="warm process has ended"):
            server.start(cells[0], {}, threading.Event())


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
