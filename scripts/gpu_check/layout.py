"""Where things lie, and what the children see of them."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLAIM = "sop-vs-nsp"


class Refused(Exception):
    """The request cannot be met; the message says why and what would help, in one line."""


def environment(site: Path, runs: Path, device: str) -> dict[str, str]:
    """The environment of a child: the project from its source, the unpacked wheels before what is installed."""
    paths = [str(ROOT / "src"), str(ROOT / "scripts"), str(site), os.environ.get("PYTHONPATH", "")]
    own = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        # The machine's own plugins were made for its own pytest.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # Nothing here may wait for a network that is not there.
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
    }
    cache = {"CLOZELAB_CACHE": os.environ.get("CLOZELAB_CACHE") or str(runs / "cache")}
    # On a CPU it is only the script that is tried, on a machine that may have other things to do.
    threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    return {**os.environ, **own, **cache, **threads}
