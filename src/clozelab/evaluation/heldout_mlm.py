"""Held-out MLM loss on fixed masks: the same positions, at the same rate, for every arm (MosaicBERT's rule).

loss = (sum of token losses) / (number of targets), in nats; perplexity is its exponential.
"""

from dataclasses import dataclass

import numpy as np
import torch

from clozelab.evaluation.yardstick import Measured, Subject
from clozelab.options import option


@option("evaluation", "heldout_mlm", package="evaluation.heldout_mlm")
@dataclass
class HeldoutMLM:
    """MLM loss and accuracy on the validation split, on pairs in true order, whatever the arm was trained on."""

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

    def measure(self, subject: Subject) -> Measured:
        """Metrics `heldout_mlm.loss` (nats a target) and `heldout_mlm.accuracy`; scores a sequence."""
        losses, corrects, counts = [], [], []
        with torch.no_grad():
            for batch in subject.batches("validation", rate=self.rate, seed=self.seed, limit=self.examples):
                hidden_BSH = subject.encode(batch)
                used_BK = batch["target_ids"] != -100
                row_N, slot_N = used_BK.nonzero(as_tuple=True)
                hidden_NH = hidden_BSH[row_N, batch["target_positions"][row_N, slot_N]]
                target_N = batch["target_ids"][row_N, slot_N]
                with subject.autocast():
                    logits_NV = subject.model.mlm_head(hidden_NH)
                loss_N = torch.nn.functional.cross_entropy(logits_NV.float(), target_N, reduction="none")
                right_N = (logits_NV.argmax(-1) == target_N).float()
                zero_B = torch.zeros(used_BK.shape[0], device=loss_N.device)
                losses.append(zero_B.index_add(0, row_N, loss_N).cpu().numpy())
                corrects.append(zero_B.index_add(0, row_N, right_N).cpu().numpy())
                counts.append(used_BK.sum(1).cpu().numpy())
        loss_E, right_E, count_E = (np.concatenate(x).astype(np.float64) for x in (losses, corrects, counts))
        total = count_E.sum()

        def metric(value: float, direction: str) -> dict[str, object]:
            return {"value": float(value), "direction": direction, "n": int(total), "yardstick": "heldout_mlm"}

        return Measured(
            metrics={
                "heldout_mlm.loss": metric(loss_E.sum() / total, "min"),
                "heldout_mlm.accuracy": metric(right_E.sum() / total, "max"),
            },
            scores={
                "heldout_mlm.loss": loss_E / count_E,
                "heldout_mlm.accuracy": right_E / count_E,
                "heldout_mlm.targets": count_E,
            },
        )
