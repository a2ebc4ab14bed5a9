"""metrics.jsonl: the local, append-only history of a run, and the source of truth for every view of it.

One row a logging step, keyed by `step` (optimiser updates) with the tokens seen beside it. A resumed run keeps its
history: rows after the step of the checkpoint are dropped once, then written again by the same computation.
"""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only

from clozelab.training.history import read_rows


class MetricLog(Logger):
    """A Lightning logger that appends rows to `<run directory>/metrics.jsonl`."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.path = directory / "metrics.jsonl"

    @property
    def name(self) -> str:
        """The logger's name."""
        return "metrics"

    @property
    def version(self) -> str:
        """One log a run: there are no versions."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: config.yaml holds the configuration."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append one row."""
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Keep the rows up to `step` and drop later ones (and a torn last line)."""
        if not self.path.exists():
            return
        rows = read_rows(self.path.parent)
        kept = [json.dumps(row) + "\n" for row in rows if row["step"] <= step]
        temporary = self.path.with_suffix(".part")
        temporary.write_text("".join(kept))
        temporary.replace(self.path)
