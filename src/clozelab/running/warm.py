"""A process that has imported all a cell needs, and forks for each: start-up is paid once a slot, not once a cell.

It holds no thread and has computed nothing, so a fork of it is as good as a fresh interpreter. One cell at a time:

    warm   ->  {"threads": 1}, when it has imported everything; with more threads it ends, as no fork would be safe
    slot   ->  {"directory": ..., "environment": {...}}
    warm   ->  {"pid": ...}, and when the cell has ended {"code": ..., "seconds": ...}

The cell is the leader of a session of its own, and ends with this process, which ends with the pool.
"""

import atexit
import contextlib
import gc
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

_WARM = (
    *("torch", "pytorch_lightning", "scipy.stats", "safetensors.torch"),
    *("clozelab.training.cell", "clozelab.training.config"),
    # What torch imports only when it first trains, or first writes a checkpoint.
    *("torch.utils.serialization", "torch.profiler._cupti_monitor"),
)
_TARGET = re.compile(r"_target_: ([\w.]+)\.(\w+)$", re.MULTILINE)
# So that imports start nothing: OpenBLAS makes its threads when numpy is imported, and whether there is a GPU is asked
# of its driver without starting it, which no fork would survive.
_QUIET = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
IMPORT_SECONDS = 600.0
"""A warm process that is not ready after so long is given up; its cells start by themselves then."""
_POLL_SECONDS = 0.05


def needed_by(directories: Iterable[Path]) -> list[str]:
    """The modules that the frozen configurations of cells name, and what those import late."""
    named: set[tuple[str, str]] = set()
    for directory in directories:
        with contextlib.suppress(OSError, UnicodeDecodeError):  # the cell will say so
            named.update(_TARGET.findall((directory / "config.yaml").read_text()))
    modules = {module for module, _ in named}
    if any(name == "WandbTracker" for _, name in named):
        modules |= {"wandb", "clozelab.tracking.guarded"}
    return sorted(modules)


class WarmSlot:
    """Starts cells from one warm process, one at a time.

    Args:
        environment: of the warm process; that of a cell is laid over it.
    """

    def __init__(self, environment: Mapping[str, str], modules: Iterable[str] = ()) -> None:
        command = [sys.executable, "-m", "clozelab.running.warm", str(os.getpid()), *modules]
        self._server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environment) | _QUIET,
            start_new_session=True,
        )
        self._read = b""
        self._ready = False
        self.pid = self._server.pid

    def start(self, directory: Path, environment: Mapping[str, str], stop: threading.Event) -> "WarmProcess":
        """The process of a cell.

        Raises:
            OSError: the warm process is gone or takes too long, or `stop` was set before it was ready.
        """
        deadline = time.monotonic() + IMPORT_SECONDS
        if not self._ready:
            threads = int(self._wait(deadline, stop)["threads"])
            if threads > 1:
                self.close()
                raise OSError(f"the warm process has {threads} threads, and would not fork safely")
            self._ready = True
        assert self._server.stdin is not None
        asked = {"directory": str(directory), "environment": dict(environment)}
        self._server.stdin.write(json.dumps(asked).encode() + b"\n")
        self._server.stdin.flush()
        # Not to be left half-way: there would be a cell that nobody watches.
        return WarmProcess(self, int(self._wait(deadline, threading.Event())["pid"]))

    def _wait(self, deadline: float, stop: threading.Event) -> dict[str, Any]:
        while (answer := self.answer(_POLL_SECONDS)) is None:
            late = time.monotonic() > deadline
            if self.gone or late or stop.is_set():
                if (answer := self.answer()) is not None:
                    break
                if late or stop.is_set():
                    self._server.kill()
                raise OSError("the warm process has ended")
        return answer

    def answer(self, seconds: float = 0.0) -> dict[str, Any] | None:
        """The next answer, or None if there is none within so many seconds."""
        assert self._server.stdout is not None
        pipe = self._server.stdout.fileno()
        # Read without Python's buffer: a second line would wait in it, where `select` does not look.
        while b"\n" not in self._read:
            if not select.select([pipe], [], [], seconds)[0] or not (more := os.read(pipe, 65536)):
                return None
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    @property
    def gone(self) -> bool:
        """Whether the warm process has ended."""
        return self._server.poll() is not None

    def close(self) -> None:
        """End the warm process."""
        for pipe in (self._server.stdin, self._server.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        try:
            self._server.wait(5)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


class WarmProcess:
    """A cell that a warm process was asked for."""

    def __init__(self, slot: WarmSlot, pid: int) -> None:
        self.pid, self._slot = pid, slot
        self._code: int | None = None
        self.seconds: float | None = None
        """from the fork to the end, of a cell that has ended"""

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        if self._code is None:
            gone = self._slot.gone  # asked first: its last word may be on the way
            answer = self._slot.answer(_POLL_SECONDS)
            if answer is not None:
                self._code, self.seconds = int(answer["code"]), float(answer["seconds"])
            elif gone:
                self._code = -signal.SIGKILL  # the cell has ended with it
        return self._code


def _serve(modules: list[str]) -> None:
    """Import, then fork a cell for each line that comes in."""
    for name in (*_WARM, *modules):
        with contextlib.suppress(Exception):  # a cell that needs it will fail by it, and say so in its own log
            __import__(name)
    # What is here now is the cells' too, and never garbage: a collection in a cell would copy all of it.
    gc.collect()
    gc.freeze()
    threads = _threads()
    _say({"threads": threads})
    if threads > 1:
        return
    here = os.getpid()
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become_cell(here, Path(asked["directory"]), asked["environment"])
        _say({"pid": pid})
        begin = time.monotonic()
        _, status = os.waitpid(pid, 0)
        _say({"code": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - begin})


def _threads() -> int:
    """Threads of this process, those of libraries included where /proc tells."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def _become_cell(parent: int, directory: Path, environment: dict[str, str]) -> NoReturn:
    """In the forked process: be what `clozelab.running.child` would be."""
    code = 1
    try:
        from clozelab.running.child import die_with_parent

        os.setsid()
        die_with_parent(parent)
        os.environ.clear()
        os.environ.update(environment)
        output = os.open(directory / "output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, output), (2, output)):
            os.dup2(source, target)
        sys.stdin = open(os.devnull)  # noqa: SIM115 (the cell's, until it ends)
        sys.argv = ["clozelab.running.child", str(directory)]
        from clozelab.training.cell import main

        code = main(str(directory))
        # What an interpreter does at its end, but for taking itself to pieces: in a fork that copies every page that
        # the warm process has, which takes longer than a small cell.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    from clozelab.running.child import die_with_parent

    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's to answer
    _serve(sys.argv[2:])
