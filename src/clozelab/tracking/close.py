"""Close the tracked run of a cell that was ended before it could close it: `python -m clozelab.tracking.close DIR`.

A killed process leaves a run open, which the service shows as running for hours and then as crashed. The local files
are the source of truth: the run is opened again under its own id, as a cell that goes on would open it, given the rows
logged so far, and closed as failed.
"""

import json
import sys
from pathlib import Path

from clozelab.options import build
from clozelab.running.directories import RUNNING, read_frozen


def close(directory: Path) -> None:
    """Close it as failed; a run that is tracked nowhere has nothing to close."""
    config = read_frozen(directory)
    identity = directory / RUNNING
    if not identity.exists():
        return  # it ended before it was told who it is
    tracker = build(config["tracker"])
    tracker.start(directory, json.loads(identity.read_text()), config)
    tracker.finish("failed")


if __name__ == "__main__":
    close(Path(sys.argv[1]))
