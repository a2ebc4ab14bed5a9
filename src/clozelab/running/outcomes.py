"""Outcomes of a Hydra sweep on a launcher of Hydra's own, whose jobs run anywhere: kept in the sweep's folder.

Hydra tells of the first failure only. Each job adds a line to `outcomes.jsonl`; who started the sweep sums them up.
"""

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback

from clozelab.running.job import Job, Outcome

OUTCOMES = "outcomes.jsonl"

_begun: list[tuple[Path, int]] = []
"""The file of the sweep that this process started, and the bytes of earlier sweeps in it."""


class SweepFolder(Callback):
    """Hydra's way of saying, in the process that starts a sweep, which folder is the sweep's."""

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        """Keep it in mind."""
        path = Path(config.hydra.sweep.dir).absolute() / OUTCOMES
        _begun[:] = [(path, path.stat().st_size if path.exists() else 0)]


def note(folder: Path, outcome: Outcome) -> None:
    """Add a line for a job that has ended."""
    folder.mkdir(parents=True, exist_ok=True)
    line = asdict(outcome) | {"job": {"name": outcome.job.name, "directory": str(outcome.job.directory)}}
    with (folder / OUTCOMES).open("a") as file:
        file.write(json.dumps(line) + "\n")


def noted() -> list[Outcome]:
    """Of the sweep that this process started: nothing if its launcher was our own."""
    lines = [line for path, size in _begun if path.exists() for line in path.read_bytes()[size:].splitlines()]
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):  # torn by a full disk
            found.append(json.loads(line))
    return [Outcome(**one | {"job": Job(one["job"]["name"], Path(one["job"]["directory"]))}) for one in found]
