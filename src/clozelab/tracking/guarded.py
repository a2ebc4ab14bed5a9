"""Lightning's W&B logger, unable to end a training: a dead service or a full disk costs rows of the view only."""

import logging
from collections.abc import Mapping

from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.utilities import rank_zero_only

log = logging.getLogger(__name__)


class GuardedWandbLogger(WandbLogger):
    """Logs until the service fails, says so once, and is silent from then on."""

    _broken = False

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """One row."""
        if self._broken:
            return
        try:
            super().log_metrics(metrics, step)
        except Exception as error:  # metrics.jsonl has the row already
            self._broken = True
            log.warning("tracker: W&B takes no more rows (%s: %s); the run goes on", type(error).__name__, error)
