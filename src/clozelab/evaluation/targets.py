"""Loss and accuracy over the targets of batches: what the held-out yardsticks of single tokens have in common.

loss = (sum of token losses) / (number of targets), in nats; perplexity is its exponential.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clozelab.evaluation.yardstick import Measured, Subject


def measure_targets(name: str, subject: Subject, batches: Iterable[dict[str, Tensor]]) -> Measured:
    """Metrics `<name>.loss` (nats a target) and `<name>.accuracy`; scores: sum and count of each sequence [E, 2]."""
    sums = []
    with torch.no_grad():
        for batch in batches:
            with subject.autocast():
                scores = subject.model.scores(batch)
            parts = (scores.mlm_loss_BK, scores.mlm_correct_BK, scores.mlm_used_BK)
            sums.append(np.stack([part.double().sum(1).cpu().numpy() for part in parts], axis=1))
    loss_E, right_E, count_E = np.concatenate(sums).T
    return (
        Measured() | ratio(f"{name}.loss", loss_E, count_E, "min") | ratio(f"{name}.accuracy", right_E, count_E, "max")
    )


def ratio(
    name: str, sum_E: npt.NDArray[np.floating[Any]], count_E: npt.NDArray[np.floating[Any]], direction: str
) -> Measured:
    """A metric that is a sum over a count, each over all sequences."""
    total = float(count_E.sum())
    metric = {"value": float(sum_E.sum() / total), "direction": direction, "n": int(total)}
    return Measured({name: metric}, {name: np.stack([sum_E, count_E], axis=1)})
