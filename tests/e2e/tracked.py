"""The tracked run of a cell, read from the file that W&B leaves beside it when offline."""

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

_BLOCK = 2**15


class TrackedRun(NamedTuple):
    """What one .wandb file holds."""

    rows: list[dict[str, Any]]
    code: int | None
    """exit code; None: the run is still open"""


def tracked_ids(directory: Path) -> list[str]:
    """Ids of the tracked runs of a cell."""
    return [path.name.split("-", 3)[3] for path in directory.glob("wandb/offline-run-*")]


def tracked(directory: Path) -> TrackedRun:
    """The one tracked run of a cell."""
    (path,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    return read_wandb(path)


def read_wandb(path: Path) -> TrackedRun:
    """Read a file: after seven bytes, blocks of 32 KiB of (checksum, length, kind) and a piece of a record."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    rows: list[dict[str, Any]] = []
    code = None
    while at + 7 <= len(data):
        room = _BLOCK - at % _BLOCK
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if room < 7 or kind == 0:  # the rest of a block is filled up
            at += room
            continue
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (2, 3):  # it goes on in the next piece
            continue
        record = wandb_internal_pb2.Record()
        record.ParseFromString(whole)
        whole = b""
        if record.HasField("history"):
            items = record.history.item
            rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
        if record.HasField("exit"):
            code = record.exit.exit_code
    return TrackedRun(rows, code)
