"""Held-out loss of the next token, for models that read from left to right.

Two such losses compare only under one tokenizer, which the yardstick's name in a record holds.
"""

from dataclasses import dataclass
from typing import ClassVar

from clozelab.evaluation.targets import measure_targets
from clozelab.evaluation.yardstick import Measured, Subject, YardstickOption
from clozelab.options import option


@option("evaluation", "heldout_clm", package="evaluation.heldout_clm")
@dataclass
class HeldoutCLM(YardstickOption):
    """Loss and accuracy of every next token of the validation split."""

    tells: ClassVar[tuple[str, ...]] = ("next",)
    gives: ClassVar[tuple[str, ...]] = ("heldout_clm.loss", "heldout_clm.accuracy")
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
        batches = subject.batches("validation", causal=True, limit=self.examples, format=self.format)
        return measure_targets("heldout_clm", subject, batches)
