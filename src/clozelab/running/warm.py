"""A process that has imported all a cell needs, and forks for each: start-up is paid once a pool, not once a cell.

It holds no thread and has computed nothing, so a fork of it is as good as a fresh interpreter. All slots of a pool
share it, so several of its forks run at a time:

    warm   ->  {"threads": 1}, when it has imported everything; with more threads it ends, as no fork would be safe
    pool   ->  {"directory": ..., "environment": {...}}, one request at a time
    warm   ->  {"pid": ...} or {"refused": why}, and whenever a cell has ended {"pid": ..., "code": ..., "seconds": ...}

A cell is the leader of a session of its own, and ends with this process, which ends with the pool.
"""

import atexit
import contextlib
import gc
import json
import os
import queue
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

from clozelab.running.directories import started

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
ANSWER_SECONDS = 60.0
"""A warm process that has not forked after so long is given up, too."""
_POLL_SECONDS = 0.05
_DEATH_SECONDS = 10.0


def needed_by(directories: Iterable[Path]) -> list[str]:
    """The modules that the frozen configurations of cells name, and what those import late."""
    named: set[tuple[str, str]] = set()
    for directory in directories:
        with contextlib.suppress(OSError, UnicodeDecodeError):  # the cell will say so
            named.update(_TARGET.findall((directory / "config.yaml").read_text()))
    modules = {module for module, _ in named}
    if any(name == "WandbTracker" for _, name in named):
        modules |= {"wandb", "wandb.apis.public", "clozelab.tracking.guarded"}
    return sorted(modules)


class WarmServer:
    """Starts cells from one warm process, for any number of threads.

    Args:
        environment: of the warm process; a cell has its own.
        modules: to import beside what every cell needs.
    """

    def __init__(self, environment: Mapping[str, str], modules: Iterable[str] = ()) -> None:
        self._server = subprocess.Popen(
            self._command(modules),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environment) | _QUIET,
            start_new_session=True,
        )
        self.pid = self._server.pid
        self._deadline = time.monotonic() + IMPORT_SECONDS
        self._imported = threading.Event()  # or never will have
        self._why_gone: str | None = None
        self._asking = threading.Lock()
        self._forked: queue.SimpleQueue[WarmProcess | OSError] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _command(self, modules: Iterable[str]) -> list[str]:
        return [sys.executable, "-m", "clozelab.running.warm", str(os.getpid()), *modules]

    def start(self, directory: Path, environment: Mapping[str, str], stop: threading.Event) -> "WarmProcess":
        """The process of a cell.

        Raises:
            OSError: the warm process is gone, takes too long or could not fork, or `stop` was set before it was ready.
        """
        while not self._imported.wait(_POLL_SECONDS):
            if stop.is_set() or time.monotonic() > self._deadline:
                self._server.kill()
                raise OSError("the warm process was ended before it had imported everything")
        with self._asking:
            if self._why_gone is not None:
                raise OSError(self._why_gone)
            assert self._server.stdin is not None
            asked = {"directory": str(directory), "environment": dict(environment)}
            self._server.stdin.write(json.dumps(asked).encode() + b"\n")
            self._server.stdin.flush()
            process = self._answer(stop)
        if isinstance(process, OSError):
            raise process
        return process

    def _answer(self, stop: threading.Event) -> "WarmProcess | OSError":
        """What became of a request: not to be left half-way, or there would be a cell that nobody watches."""
        begin = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                return self._forked.get(timeout=_POLL_SECONDS)
            if time.monotonic() - begin > (_DEATH_SECONDS if stop.is_set() else ANSWER_SECONDS):
                self._server.kill()  # it hangs; the listener hears of its end, and answers for it

    def _listen(self) -> None:
        """Hand out what the warm process says, until it ends; its cells have ended then, too."""
        assert self._server.stdout is not None
        cells: dict[int, WarmProcess] = {}
        why = "the warm process has ended"
        try:
            for line in self._server.stdout:
                answer: dict[str, Any] = json.loads(line)
                if (threads := answer.get("threads", 0)) > 1:
                    why = f"the warm process has {threads} threads, and would not fork safely"
                    break
                if threads:
                    self._imported.set()
                elif "refused" in answer:
                    self._forked.put(OSError(f"the warm process could not fork: {answer['refused']}"))
                elif "code" in answer:
                    cells.pop(answer["pid"]).end(int(answer["code"]), float(answer["seconds"]))
                else:
                    process = cells[answer["pid"]] = WarmProcess(int(answer["pid"]))
                    self._forked.put(process)
        except (ValueError, KeyError, TypeError) as error:
            why = f"the warm process was not understood ({type(error).__name__}: {error})"
        finally:
            self._server.kill()
            self._server.wait()
            self._why_gone = why
            self._imported.set()
            self._forked.put(OSError(why))
            for process in cells.values():
                process.end_with_server()

    @property
    def gone(self) -> bool:
        """Whether the warm process has ended."""
        return self._why_gone is not None

    def close(self) -> None:
        """End the warm process, and what still runs of its cells."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with contextlib.suppress(OSError):
            self._server.stdin.close()
        self._listener.join(5)
        self._server.kill()
        self._listener.join()
        self._server.stdout.close()


class WarmProcess:
    """A cell that a warm process has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code = 0
        self._ended = threading.Event()
        self.seconds: float | None = None
        """from the fork to the end, of a cell that has ended by itself"""

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._code if self._ended.is_set() else None

    def wait(self, timeout: float) -> int:
        """Exit code, as soon as there is one.

        Raises:
            subprocess.TimeoutExpired: it runs after so many seconds.
        """
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a cell", timeout)
        return self._code

    def end(self, code: int, seconds: float | None = None) -> None:
        """Heard of its end."""
        self._code, self.seconds = code, seconds
        self._ended.set()

    def end_with_server(self) -> None:
        """Nobody will hear of its end: see to it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + _DEATH_SECONDS
        while started(self.pid) is not None and time.monotonic() < deadline:  # until then its directory is in use
            time.sleep(0.01)
        self.end(-signal.SIGKILL)


class _Server:
    """The warm process itself: forks a cell for each line that comes in."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._begun: dict[int, float] = {}
        # An import may print, and must not be taken for an answer.
        self._answers = os.dup(1)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.close(nothing)
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)

    def serve(self, modules: list[str]) -> None:
        """Import, then fork, until the pool closes its end."""
        gc.disable()  # next to nothing that is imported is garbage, and to look for it takes a fifth of the time
        for name in (*_WARM, *modules):
            with contextlib.suppress(Exception):  # a cell that needs it will fail by it, and say so in its own log
                __import__(name)
        sys.stdout.flush()  # what imports have printed would else be printed by every cell
        gc.freeze()  # it is the cells' too, in which a collection would copy all of it
        gc.enable()
        threads = _threads()
        self._say({"threads": threads})
        if threads > 1:
            return
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        try:
            while True:
                ready = select.select([0, self._woken], [], [])[0]
                if self._woken in ready:
                    os.read(self._woken, 4096)
                    self._bury()
                # One request at a time is on its way: no second line waits in a buffer, where `select` does not look.
                if 0 in ready:
                    if not (line := sys.stdin.buffer.readline()):
                        return
                    self._fork(json.loads(line))
        finally:
            for pid in self._begun:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def _fork(self, asked: dict[str, Any]) -> None:
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, or no memory: of no concern to the cells that run
            self._say({"refused": str(error)})
            return
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for pipe in (self._answers, self._woken, self._wake):
                os.close(pipe)
            _become_cell(self._pid, Path(asked["directory"]), asked["environment"])
        self._begun[pid] = time.monotonic()
        self._say({"pid": pid})

    def _bury(self) -> None:
        """Tell of every cell that has ended."""
        while self._begun:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if (begin := self._begun.pop(pid, None)) is not None:
                seconds = time.monotonic() - begin
                self._say({"pid": pid, "code": os.waitstatus_to_exitcode(status), "seconds": seconds})

    def _say(self, answer: dict[str, Any]) -> None:
        os.write(self._answers, json.dumps(answer).encode() + b"\n")


def _threads() -> int:
    """Threads of this process, those of libraries included where /proc tells."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _become_cell(parent: int, directory: Path, environment: dict[str, str]) -> NoReturn:
    """In the forked process: be what `clozelab.running.child` would be."""
    code = 1
    try:
        os.setsid()
        from clozelab.running.child import die_with_parent

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
    try:
        _Server().serve(sys.argv[2:])
    finally:
        os._exit(0)  # to take all that was imported to pieces would take longer than a small cell
