"""Where configurations and claims are found, in the checkout or inside the installed package; where runs are kept."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _shipped(name: str) -> Path:
    """`name` at the top of the source checkout if this is one, else the copy inside the wheel."""
    checkout = _PACKAGE.parents[1]
    if (checkout / "pyproject.toml").is_file() and (checkout / name).is_dir():
        return checkout / name
    return _PACKAGE / name


def conf_dir() -> Path:
    """Folder of the Hydra groups and presets."""
    return _shipped("conf")


def claim_roots() -> list[Path]:
    """Folders that hold claims: `experiments` here, then the shipped ones."""
    candidates = (Path.cwd() / "experiments", _shipped("experiments"))
    return list(dict.fromkeys(path.resolve() for path in candidates if path.is_dir()))


def runs_dir() -> Path:
    """Folder under which run directories are made: CLOZELAB_RUNS, or `./runs`."""
    return Path(os.environ.get("CLOZELAB_RUNS") or "runs")
