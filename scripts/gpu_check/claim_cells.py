"""The cells of the claim: how far each has come, and the one archive in which they travel."""

import json
import os
import tarfile
from pathlib import Path
from typing import Any

from gpu_check.layout import CLAIM, Refused

# What a finished cell is published from, and what explains one that is not.
KEPT = ("config.yaml", "record.json", "scores.npz", "metrics.jsonl", "train.log", "output.log", "failure.json")
CHECKPOINT = Path("checkpoints") / "last.ckpt"


def _planned(folder: Path) -> list[tuple[str, int, str, Path]]:
    """(arm, seed, identity, directory) of every cell."""
    path = folder / "plan.json"
    if not path.exists():
        return []
    return [(arm, seed, cell, folder / name) for arm, seed, cell, name in json.loads(path.read_text())["cells"]]


def _is_done(directory: Path, cell: str) -> bool:
    path = directory / "record.json"
    return path.exists() and json.loads(path.read_text())["cell"] == cell


def done(folder: Path) -> int:
    """Cells with a record."""
    return sum(_is_done(directory, cell) for _, _, cell, directory in _planned(folder))


def states(folder: Path) -> list[dict[str, Any]]:
    """Arm, seed and state of each cell: done, failed, begun or waiting; of a begun one, how far it is and how fast."""
    found = []
    for arm, seed, cell, directory in _planned(folder):
        entry: dict[str, Any] = {"arm": arm, "seed": seed, "cell": cell, "state": "waiting"}
        rows = _rows(directory / "metrics.jsonl")
        failure = directory / "failure.json"
        if _is_done(directory, cell):
            entry["state"] = "done"
        elif failure.exists() and (told := json.loads(failure.read_text()))["status"] == "failed":
            entry |= {"state": "failed", "message": told["reason"]}
        elif rows:
            entry["state"] = "begun"
        if rows:
            entry |= {key: rows[-1][key] for key in ("step", "progress", "tokens_per_second", "loss/mlm")}
        found.append(entry)
    return found


def _rows(path: Path) -> list[dict[str, float]]:
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def pack(folder: Path, out: Path, checkpoints: bool) -> None:
    """Write the archive, whole or not at all.

    Args:
        checkpoints: add those of the cells that are not done, tens of megabytes each.
    """
    planned = _planned(folder)
    if not planned:
        return
    path = out / f"{CLAIM}-{folder.name}.tar.gz"
    temporary = path.with_suffix(".part")
    with tarfile.open(temporary, "w:gz") as archive:
        archive.add(folder / "plan.json", f"{CLAIM}/{folder.name}/plan.json")
        for _, _, cell, directory in planned:
            names = [Path(name) for name in KEPT]
            if checkpoints and not _is_done(directory, cell):
                names.append(CHECKPOINT)
            for name in names:
                if (directory / name).exists():
                    archive.add(directory / name, f"{CLAIM}/{folder.name}/{directory.name}/{name}")
    os.replace(temporary, path)


def unpack(kept: Path, runs: Path, scale: str) -> None:
    """Lay the cells of an earlier output folder into the run folder; what is there already stays.

    Raises:
        Refused: the archive cannot be read.
    """
    path = kept / f"{CLAIM}-{scale}.tar.gz"
    if not path.exists():
        return
    try:
        with tarfile.open(path) as archive:
            fresh = [member for member in archive if not (runs / member.name).exists()]
            archive.extractall(runs, fresh, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise Refused(f"{path} cannot be read ({error}); take a copy that is whole") from error
