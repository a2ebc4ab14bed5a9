"""Held-out MLM loss on fixed masks: the same positions, at the same rate, for every arm (MosaicBERT's rule)."""

from dataclasses import dataclass
from typing import ClassVar

from clozelab.evaluation.targets import measure_targets
from clozelab.evaluation.yardstick import Measured, Subject, YardstickOption
from clozelab.options import option


@option("evaluation", "heldout_mlm", package="evaluation.heldout_mlm")
@dataclass
class HeldoutMLM(YardstickOption):
    """MLM loss and accuracy on the validation split, on pairs in true order, whatever the arm was trained on."""

    tells: ClassVar[tuple[str, ...]] = ("hidden",)
    gives: ClassVar[tuple[str, ...]] = ("heldout_mlm.loss", "heldout_mlm.accuracy")
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
        batches = subject.batches("validation", rate=self.rate, seed=self.seed, limit=self.examples, format=self.format)
        return measure_targets("heldout_mlm", subject, batches)
