"""Reading a run's metrics.jsonl from outside, while it may still be written."""

import json
from pathlib import Path
from typing import Any


def read_rows(directory: Path) -> list[dict[str, Any]]:
    """Every complete row of a run's history, oldest first; a torn last line is left out."""
    path = directory / "metrics.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def last_row(directory: Path) -> dict[str, Any] | None:
    """The newest complete row of a run's history, or None; reads only the end of the file."""
    path = directory / "metrics.jsonl"
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 4096))
        lines = file.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict):
            return row
    return None
