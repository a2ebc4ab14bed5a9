"""Held-out MLM loss on fixed masks: the same positions, at the same rate, for every arm (MosaicBERT's rule).

loss = (sum of token losses) / (number of targets), in nats; perplexity is its exponential.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from clozelab.evaluation.yardstick import Measured, Subject
from clozelab.options import option


@option("evaluation", "heldout_mlm", package="evaluation.heldout_mlm")
@dataclass
class HeldoutMLM:
    """MLM loss and accuracy on the validation split, on pairs in true order, whatever the arm was trained on."""

    causal: ClassVar[bool] = False
    examples: int = 2048
    """Validation sequences (fewer if the split holds fewer)."""
    rate: float = 0.15
    """Share of tokens to predict, whatever the training rate."""
    seed: int = 0
    """Seed of the evaluation masks; not the run's seed."""

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise ValueError(f"evaluation.heldout_mlm.examples is {self.examples}; it must be at least 1")
        if not 0 < self.rate < 1:
            raise ValueError(f"evaluation.heldout_mlm.rate is {self.rate}; it must lie between 0 and 1")

    def needs(self) -> list[tuple[str, str]]:
        """Validation pairs in true order."""
        return [("validation", "none")]

    def measure(self, subject: Subject) -> Measured:
        """Metrics `heldout_mlm.loss` (nats a target) and `heldout_mlm.accuracy`; scores a sequence."""
        losses, corrects, counts = [], [], []
        with torch.no_grad():
            for batch in subject.batches("validation", rate=self.rate, seed=self.seed, limit=self.examples):
                with subject.autocast():
                    scores = subject.model.scores(batch)
                losses.append(scores.mlm_loss_BK.double().sum(1).cpu().numpy())
                corrects.append(scores.mlm_correct_BK.double().sum(1).cpu().numpy())
                counts.append(scores.mlm_used_BK.double().sum(1).cpu().numpy())
        loss_E, right_E, count_E = (np.concatenate(x) for x in (losses, corrects, counts))
        total = count_E.sum()

        def metric(value: float, direction: str) -> dict[str, object]:
            return {"value": float(value), "direction": direction, "n": int(total)}

        return Measured(
            metrics={
                "heldout_mlm.loss": metric(loss_E.sum() / total, "min"),
                "heldout_mlm.accuracy": metric(right_E.sum() / total, "max"),
            },
            scores={
                "heldout_mlm.loss": np.stack([loss_E, count_E], axis=1),
                "heldout_mlm.accuracy": np.stack([right_E, count_E], axis=1),
            },
        )
