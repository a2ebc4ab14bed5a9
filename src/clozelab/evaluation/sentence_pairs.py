"""Two thirds of the matrix of ALBERT, Table 5: NSP and SOP accuracy of every arm (the third is `heldout_mlm.accuracy`).

An arm is measured by its own head on the objective that it was trained on (`own`), and every arm, whatever it was
trained on, by a linear probe on the frozen encoder (`probe`): logistic regression on [h_CLS; mean h_A; mean h_B],
fitted on pairs of the training split and scored on pairs of the validation split.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clozelab.evaluation.yardstick import Measured, Subject, YardstickOption
from clozelab.options import option

OBJECTIVES = {"nsp": "next", "sop": "order"}


@option("evaluation", "sentence_pairs", package="evaluation.sentence_pairs")
@dataclass
class SentencePairs(YardstickOption):
    """NSP and SOP accuracy by the arm's own head and by a linear probe."""

    tells: ClassVar[tuple[str, ...]] = ("hidden", "replaced")
    gives: ClassVar[tuple[str, ...]] = (
        *(f"pairs.{name}.{by}" for name in OBJECTIVES for by in ("probe", "own")),
        "pairs.mean.probe",
    )
    examples: int = 2048
    """Validation pairs (fewer if the split holds fewer)."""
    probe_examples: int = 4096
    """Training pairs that the probe is fitted on."""
    probe_l2: float = 1e-2
    """L2 penalty of the probe's weights, on standardised features."""
    seed: int = 0
    """Seed of the evaluation pairs; not the run's seed."""

    def __post_init__(self) -> None:
        for key in ("examples", "probe_examples"):
            if getattr(self, key) < 2:
                raise ValueError(f"evaluation.sentence_pairs.{key} is {getattr(self, key)}; it must be at least 2")
        if not (math.isfinite(self.probe_l2) and self.probe_l2 >= 0):
            raise ValueError(f"evaluation.sentence_pairs.probe_l2 is {self.probe_l2}; give 0 or more")

    def needs(self) -> list[tuple[str, str]]:
        """NSP and SOP pairs of both splits."""
        return [(split, objective) for split in ("train", "validation") for objective in OBJECTIVES.values()]

    def measure(self, subject: Subject) -> Measured:
        """Metrics `pairs.{nsp,sop}.{own,probe}` and `pairs.mean.probe` (accuracies); scores are 0 or 1 a pair."""
        measured = Measured()

        def add(name: str, right_E: npt.NDArray[np.float64]) -> None:
            measured.metrics[name] = {
                "value": float(right_E.mean()),
                "direction": "max",
                "n": len(right_E),
            }
            measured.scores[name] = right_E

        probes = []
        for name, objective in OBJECTIVES.items():
            train_EF, train_E, _ = self._features(subject, "train", objective, self.probe_examples)
            test_EF, test_E, own_E = self._features(subject, "validation", objective, self.examples)
            predicted_E = fit_logistic(train_EF, train_E, self.probe_l2)(test_EF)
            right_E = (predicted_E == test_E).numpy().astype(np.float64)
            add(f"pairs.{name}.probe", right_E)
            probes.append(right_E.mean())
            if own_E is not None:
                add(f"pairs.{name}.own", (own_E == test_E).numpy().astype(np.float64))
        measured.metrics["pairs.mean.probe"] = {
            "value": float(np.mean(probes)),
            "direction": "max",
            "n": sum(len(measured.scores[f"pairs.{name}.probe"]) for name in OBJECTIVES),
        }
        return measured

    def _features(
        self, subject: Subject, split: str, objective: str, limit: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """features_EF, labels_E and the own head's predictions_E (None: the arm has no head for this objective)."""
        features, labels, own = [], [], []
        has_head = subject.model.pair is not None and subject.pair_objective == objective
        with torch.no_grad():
            batches = subject.batches(
                split, pair=objective, masked=False, seed=self.seed, limit=limit, format=self.format
            )
            for batch in batches:
                hidden_BSH = subject.encode(batch)
                features.append(pool(hidden_BSH, batch["segment_ids"], batch["attention_mask"]).cpu())
                labels.append(batch["pair_labels"].cpu())
                if has_head:
                    assert subject.model.pair is not None
                    with subject.autocast():
                        own.append(subject.model.pair(hidden_BSH).argmax(-1).cpu())
        return torch.cat(features), torch.cat(labels), torch.cat(own) if own else None


def pool(hidden_BSH: Tensor, segments_BS: Tensor, attention_BS: Tensor) -> Tensor:
    """[h_CLS; mean h_A; mean h_B], float64 [B, 3H]; padding is left out of the means."""
    parts = [hidden_BSH[:, 0]]
    for segment in (0, 1):
        inside_BS1 = ((segments_BS == segment) & attention_BS).unsqueeze(-1).to(hidden_BSH.dtype)
        parts.append((hidden_BSH * inside_BS1).sum(1) / inside_BS1.sum(1).clamp(min=1))
    return torch.cat(parts, dim=-1).double()


def fit_logistic(features_EF: Tensor, labels_E: Tensor, l2: float) -> Any:
    """Logistic regression by L-BFGS on standardised features; returns a function features -> predicted labels.

    Minimises mean log-loss + l2/2 * |w|^2. Deterministic: full batches in float64 from zero weights.
    """
    mean_F, scale_F = features_EF.mean(0), features_EF.std(0).clamp(min=1e-8)
    x_EF, y_E = (features_EF - mean_F) / scale_F, labels_E.double()
    weight_F = torch.zeros(x_EF.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([weight_F, bias], max_iter=200, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(x_EF @ weight_F + bias, y_E)
        loss = loss + 0.5 * l2 * weight_F.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        solver.step(closure)  # type: ignore[no-untyped-call]

    def predict(test_EF: Tensor) -> Tensor:
        with torch.no_grad():
            return (((test_EF - mean_F) / scale_F) @ weight_F + bias > 0).long()

    return predict
