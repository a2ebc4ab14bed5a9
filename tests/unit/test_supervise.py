"""Supervision of a cell, with small processes in the place of cells."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from clozelab.running import supervise as module
from clozelab.running.job import Job, Limits, cause_of
from clozelab.running.supervise import environment_of, supervise

DONE = "import json; json.dump({'cell': 'c', 'status': 'finished'}, open('record.json', 'w'))"


def starter(code: str) -> Callable[[Path, Mapping[str, str]], subprocess.Popen[bytes]]:
    """Starts Python code in the cell's directory, and counts its starts in the file `starts`."""

    def start(directory: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with (directory / "starts").open("a") as file:
            file.write("x")
        return subprocess.Popen([sys.executable, "-c", code], cwd=directory, start_new_session=True)

    return start


def told(directory: Path) -> str:
    """What failure.json says; train.log must say it too."""
    reason = str(json.loads((directory / "failure.json").read_text())["reason"])
    assert reason in (directory / "train.log").read_text()
    return reason


def alive(pid: int) -> bool:
    """Whether a process runs (one that waits to be reaped does not)."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_the_record_decides(tmp_path: Path) -> None:
    outcome = supervise(Job("a", tmp_path, "c"), Limits(), os.environ, starter(DONE + "; raise SystemExit(3)"))
    assert outcome.done
    assert not outcome.failed
    assert not (tmp_path / "failure.json").exists()


def test_a_record_of_another_cell_is_a_failure(tmp_path: Path) -> None:
    outcome = supervise(Job("a", tmp_path, "other"), Limits(retries=2), os.environ, starter(DONE))
    assert outcome.failed
    assert outcome.reason.startswith("its record is of another cell")
    assert (tmp_path / "starts").read_text() == "x"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_record_that_cannot_be_read_is_a_failure(tmp_path: Path, text: str) -> None:
    (tmp_path / "record.json").write_text(text)
    outcome = supervise(Job("a", tmp_path, "c"), Limits(), os.environ, starter("pass"))
    assert outcome.failed
    assert "record.json cannot be read" in outcome.reason


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("pass", "exit code 0 and no record"),
        ("raise SystemExit(7)", "exit code 7 and no record"),
        ("import os; os.kill(os.getpid(), 9)", "ended by signal SIGKILL"),
        ("import os; os.abort()", "ended by signal SIGABRT"),
    ],
)
def test_an_end_without_a_word_is_told_of(tmp_path: Path, code: str, cause: str) -> None:
    outcome = supervise(Job("a", tmp_path), Limits(), os.environ, starter(code))
    assert outcome.failed
    assert outcome.reason == cause == told(tmp_path)


def test_a_signal_without_a_name_has_a_cause(tmp_path: Path) -> None:
    assert "signal" in cause_of(tmp_path, -signal.SIGRTMIN - 3)


def test_a_cell_that_tells_is_believed(tmp_path: Path) -> None:
    code = "import json; json.dump({'reason': 'its own words'}, open('failure.json', 'w')); raise SystemExit(1)"
    assert supervise(Job("a", tmp_path), Limits(), os.environ, starter(code)).reason == "its own words"
    assert not (tmp_path / "train.log").exists()


def test_an_old_cause_is_not_told_again(tmp_path: Path) -> None:
    (tmp_path / "failure.json").write_text('{"reason": "of last week"}')
    assert supervise(Job("a", tmp_path), Limits(), os.environ, starter("pass")).reason == "exit code 0 and no record"


def test_a_process_that_cannot_be_started_is_an_outcome(tmp_path: Path) -> None:
    def start(directory: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        raise OSError(12, "no memory to fork")

    outcome = supervise(Job("a", tmp_path), Limits(retries=1), os.environ, start)
    assert outcome.failed
    assert "no memory to fork" in outcome.reason
    assert len(outcome.causes) == 2
    assert "no memory to fork" in told(tmp_path)


def test_a_directory_that_is_gone_is_an_outcome(tmp_path: Path) -> None:
    outcome = supervise(Job("a", tmp_path / "gone"), Limits(), os.environ)
    assert outcome.failed
    assert "gone" in outcome.reason


def test_a_limit_of_time(tmp_path: Path) -> None:
    outcome = supervise(Job("a", tmp_path), Limits(seconds=0.5), os.environ, starter("import time; time.sleep(600)"))
    assert "time limit of 0.5 s" in outcome.reason
    assert "time limit" in told(tmp_path)
    assert outcome.seconds < 60


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured in /proc")
def test_a_limit_of_memory_holds_for_all_processes_of_a_cell_together(tmp_path: Path) -> None:
    # Two processes, each of them within the limit.
    code = "import os, time; os.fork(); held = bytearray(os.urandom(1 << 20) * 120); time.sleep(600)"
    outcome = supervise(Job("a", tmp_path), Limits(seconds=60, bytes=200 * 2**20), os.environ, starter(code))
    assert "out of memory" in outcome.reason
    assert "its limit is 0.20 GiB" in told(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nothing_of_a_group_outlives_its_cell(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "open('pid', 'w').write(str(child.pid))"
    )
    supervise(Job("a", tmp_path), Limits(), os.environ, starter(code))
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def test_another_attempt_after_a_failure(tmp_path: Path) -> None:
    code = f"import os; os.kill(os.getpid(), 9) if open('starts').read() == 'x' else None; {DONE}"
    outcome = supervise(Job("a", tmp_path, "c"), Limits(retries=2), os.environ, starter(code))
    assert not outcome.failed
    assert outcome.causes == ["ended by signal SIGKILL"]
    assert (tmp_path / "starts").read_text() == "xx"
    assert not (tmp_path / "failure.json").exists()


def test_attempts_end_and_each_cause_is_told(tmp_path: Path) -> None:
    code = "import os; os.kill(os.getpid(), 9) if open('starts').read() == 'x' else None; raise SystemExit(4)"
    outcome = supervise(Job("a", tmp_path), Limits(retries=1), os.environ, starter(code))
    assert outcome.reason == "exit code 4 and no record (attempt 2; before: ended by signal SIGKILL)"


def test_a_refused_configuration_is_refused_once(tmp_path: Path) -> None:
    code = "import json; json.dump({'reason': 'no such model'}, open('failure.json', 'w')); raise SystemExit(2)"
    assert supervise(Job("a", tmp_path), Limits(retries=3), os.environ, starter(code)).reason == "no such model"
    assert (tmp_path / "starts").read_text() == "x"


def test_in_a_directory_of_another_process_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "output.log").write_text("clozelab: it is in use by another process\n")
    outcome = supervise(Job("a", tmp_path), Limits(), os.environ, starter("raise SystemExit(2)"))
    assert outcome.reason == "it is in use by another process"
    assert not (tmp_path / "failure.json").exists()
    assert not (tmp_path / "train.log").exists()


@pytest.mark.parametrize("deaf", [False, True])
def test_a_stop_is_asked_for_and_then_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaf: bool) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.5)
    hear = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if deaf else "pass"
    code = f"import signal, time; {hear}; open('ready', 'w').close(); time.sleep(600)"
    stop = threading.Event()

    def stop_when_ready() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.02)
        stop.set()

    thread = threading.Thread(target=stop_when_ready)
    thread.start()
    outcome = supervise(Job("a", tmp_path), Limits(retries=5), os.environ, starter(code), stop)
    thread.join()
    assert outcome.reason == f"ended by signal {'SIGKILL' if deaf else 'SIGTERM'}"
    assert json.loads((tmp_path / "failure.json").read_text())["status"] == "killed"
    assert (tmp_path / "starts").read_text() == "x"


def test_the_environment_of_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "WORLD_SIZE", "SLURM_NTASKS", "PL_GLOBAL_SEED"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "yes")
    found = environment_of(3, "1,2")
    assert not {"LOCAL_RANK", "WORLD_SIZE", "SLURM_NTASKS", "PL_GLOBAL_SEED"} & found.keys()
    assert found["KEPT"] == "yes"
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["CUDA_VISIBLE_DEVICES"] == "1,2"
