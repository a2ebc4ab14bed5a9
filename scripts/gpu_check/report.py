"""gpu_check.json: what is known so far. It is rewritten whole after every finding, so a kill loses nothing.

A finding is done when it carries the stamp of this start: same code, same torch, same device. Findings under another
stamp are dropped: numbers of two states of the code, or of two machines, do not belong in one table.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from gpu_check.layout import ROOT, Refused

SCHEMA = 1
NAME = "gpu_check.json"
# What the findings depend on.
_CODE = ("src/clozelab/models", "src/clozelab/training", "scripts/gpu_check", "tests/gpu")


def code_hash() -> str:
    """Hash of the sources that the findings depend on."""
    state = hashlib.blake2b(digest_size=8)
    for folder in _CODE:
        for file in sorted((ROOT / folder).rglob("*.py")):
            state.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return state.hexdigest()


class Report:
    """The content of gpu_check.json in `out`."""

    def __init__(self, out: Path, size: str, device: str) -> None:
        self.path = out / NAME
        self.stamp = ""
        self.data: dict[str, Any] = {"schema": SCHEMA, "size": size, "device": device}
        if self.path.exists():
            self.data = _read(self.path, size, device)
        defaults: dict[str, Any] = {"starts": 0, "tests_complete": ""}
        defaults |= {part: {} for part in ("environment", "wheels", "ceiling", "tests", "speed", "claim")}
        self.data = {**self.data, **{key: self.data.get(key, value) for key, value in defaults.items()}}
        self.data["starts"] += 1
        self.data["seconds"] = {}

    def set_stamp(self, stamp: str) -> None:
        """Say what this start measures, and drop the findings of anything else."""
        self.stamp = stamp
        for part in ("tests", "speed"):
            self.data[part] = {key: entry for key, entry in self.data[part].items() if entry["stamp"] == stamp}
        if self.data["claim"].get("stamp") != stamp:
            self.data["claim"] = {}
        self.save()

    def put(self, part: str, key: str, **entry: Any) -> None:
        """Add a finding."""
        self.data[part][key] = {**entry, "stamp": self.stamp}
        self.save()

    def save(self) -> None:
        """Write the file, whole or not at all."""
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self.path)


def _read(path: Path, size: str, device: str) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = (data["schema"], data["size"], data["device"])
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(f"{path} is no report of this check ({error}); choose another --out") from error
    if found != (SCHEMA, size, device):
        raise Refused(
            f"{path} holds a check of size {found[1]} on {found[2]} (schema {found[0]}), this is size {size} on "
            f"{device} (schema {SCHEMA}); choose another --out"
        )
    return dict(data)
