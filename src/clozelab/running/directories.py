"""Run directories: one a run, made exclusively, with its frozen configuration inside."""

import contextlib
import json
import os
import re
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import yaml

CHECKPOINT = Path("checkpoints") / "last.ckpt"

FROZEN = "config.yaml"
RUNNING = "running.json"


def say_running(directory: Path, identity: dict[str, Any]) -> None:
    """Leave word of which process runs the cell of a directory, and who the cell is."""
    pid = os.getpid()
    process = {"host": socket.gethostname(), "pid": pid, "since": time.time(), "started": started(pid)}
    temporary = directory / f"{RUNNING}.part"
    temporary.write_text(json.dumps(identity | process) + "\n")
    temporary.replace(directory / RUNNING)


def started(pid: int) -> str | None:
    """What tells a process from an earlier one of the same number; None: it has ended, or cannot be asked here.

    The boot and the clock ticks since then at which it started. (The times of the folder `/proc/PID` are those at which
    somebody first looked.)
    """
    with contextlib.suppress(OSError, IndexError):
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if state not in "ZX":  # dead, and not buried yet
            return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{rest[18]}"
    return None


def check_room(directory: Path, needed: int, what: str) -> None:
    """Raise ValueError unless the disk of `directory` (which need not exist yet) has `needed` bytes free."""
    existing = next(folder for folder in [directory.absolute(), *directory.absolute().parents] if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ValueError(
            f"{what} need about {needed / 1e6:,.0f} MB in {directory}, and {free / 1e6:,.0f} MB are free on its disk; "
            "make room, or choose another folder for runs"
        )


def slug(text: str, length: int = 40) -> str:
    """A short name that is safe on every file system."""
    return re.sub(r"[^A-Za-z0-9_.=-]+", "-", text).strip("-")[:length] or "run"


def freeze(directory: Path, config: dict[str, Any]) -> None:
    """Write the configuration that the cell will read, whole or not at all.

    Raises:
        ValueError: no room on the disk, or the folder cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f"{FROZEN}.part"
        temporary.write_text(yaml.safe_dump(config, sort_keys=True, allow_unicode=True), encoding="utf-8")
        temporary.replace(directory / FROZEN)
    except OSError as error:
        raise ValueError(f"cannot write the run directory {directory}: {error.strerror or error}") from error


def read_frozen(directory: Path) -> dict[str, Any]:
    """The configuration that `freeze` wrote."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast
    config: dict[str, Any] = yaml.load((directory / FROZEN).read_text(encoding="utf-8"), loader)
    return config


def unique_directory(root: Path, name: str) -> Path:
    """A new directory `root/name`, or `root/name-2`, ...: two runs started in the same second never share one."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 10_000):
            directory = root / (name if attempt == 1 else f"{name}-{attempt}")
            try:
                directory.mkdir()
                return directory
            except FileExistsError:
                continue
    except OSError as error:
        raise ValueError(f"cannot make a run directory under {root}: {error.strerror or error}") from error
    raise ValueError(f"{root} already holds 10,000 directories named {name}")
