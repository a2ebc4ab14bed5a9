"""Held-out loss of the next token, for models that read from left to right.

loss = (sum of token losses) / (number of targets), in nats; perplexity is its exponential. Two such losses compare only
under one tokenizer, which the yardstick's name in a record holds.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from clozelab.evaluation.yardstick import Measured, Subject
from clozelab.options import option


@option("evaluation", "heldout_clm", package="evaluation.heldout_clm")
@dataclass
class HeldoutCLM:
    """Loss and accuracy of every next token of the validation split."""

    causal: ClassVar[bool] = True
    examples: int = 2048
    """Validation sequences (fewer if the split holds fewer)."""

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise ValueError(f"evaluation.heldout_clm.examples is {self.examples}; it must be at least 1")

    def needs(self) -> list[tuple[str, str]]:
        """Validation sequences in true order."""
        return [("validation", "none")]

    def measure(self, subject: Subject) -> Measured:
        """Metrics `heldout_clm.loss` (nats a token) and `heldout_clm.accuracy`; scores a sequence."""
        sums = []
        with torch.no_grad():
            for batch in subject.batches("validation", causal=True, limit=self.examples):
                with subject.autocast():
                    scores = subject.model.scores(batch)
                parts = (scores.mlm_loss_BK, scores.mlm_correct_BK, scores.mlm_used_BK)
                sums.append(np.stack([part.double().sum(1).cpu().numpy() for part in parts], axis=1))
        loss_E, right_E, count_E = np.concatenate(sums).T
        total = int(count_E.sum())
        loss = {"value": float(loss_E.sum() / total), "direction": "min", "n": total}
        accuracy = {"value": float(right_E.sum() / total), "direction": "max", "n": total}
        return Measured(
            metrics={"heldout_clm.loss": loss, "heldout_clm.accuracy": accuracy},
            scores={
                "heldout_clm.loss": np.stack([loss_E, count_E], axis=1),
                "heldout_clm.accuracy": np.stack([right_E, count_E], axis=1),
            },
        )
