"""How a child tells what it found: one JSON object a line, appended to a file, so that what was told survives it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VARIABLE = "GPU_CHECK_EVENTS"


def tell(**event: Any) -> None:
    """Called by a child."""
    with open(os.environ[VARIABLE], "a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


class Listener:
    """The parent's side: yields each event once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0
        path.write_bytes(b"")

    def new(self) -> Iterator[dict[str, Any]]:
        """Events that were told since the last call; a line that is still being written waits for the next one."""
        with self.path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                yield json.loads(line)
