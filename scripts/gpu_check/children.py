"""Run a command until it ends or its time is up, listening to what it tells."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_check.events import VARIABLE, Listener
from gpu_check.layout import ROOT


class Stopped(BaseException):
    """A signal asked the check to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def watch(
    command: list[str],
    seconds: float,
    log: Path,
    environment: dict[str, str],
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    on_tick: Callable[[], None] = lambda: None,
    grace: float = 5.0,
) -> int | None:
    """The exit code of the command, or None where its time was up.

    Args:
        seconds: after which it gets SIGTERM; what it started must end with it.
        log: its output is appended there.
        on_event: told of each event, also of the last ones of a command that was ended.
        on_tick: called about twice a second.
        grace: seconds between SIGTERM and SIGKILL.
    """
    with tempfile.TemporaryDirectory() as folder, log.open("ab") as output:
        listener = Listener(Path(folder) / "events.jsonl")
        output.write(f"\n$ {' '.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, VARIABLE: str(listener.path)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a group of its own, which is ended as a whole
        )
        deadline = time.monotonic() + seconds
        code: int | None = None
        try:
            while code is None and time.monotonic() < deadline:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(min(0.5, max(0.0, deadline - time.monotonic())))
                for event in listener.new():
                    on_event(event)
                on_tick()
        finally:
            if process.poll() is None:
                _end(process, grace)
            for event in listener.new():
                on_event(event)
        return code


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            return
