"""Held-out replaced-token detection: the run's own generator fills fixed places with fixed draws, and the discriminator
tells which tokens it put there.

A harder generator makes a harder yardstick: two such losses compare only where the generators do (their loss is
reported too). Most tokens stand as they were, so accuracy is high for a model that always says so; `balanced` is the
mean of the shares told right among those that were replaced and those that were not, 0.5 by chance.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from clozelab.evaluation.targets import ratio
from clozelab.evaluation.yardstick import Measured, Subject, YardstickOption
from clozelab.options import option


@option("evaluation", "heldout_replaced", package="evaluation.heldout_replaced")
@dataclass
class HeldoutReplaced(YardstickOption):
    """Loss and accuracy of the discriminator, and the loss of its generator, on the validation split."""

    tells: ClassVar[tuple[str, ...]] = ("replaced",)
    gives: ClassVar[tuple[str, ...]] = tuple(
        f"heldout_replaced.{name}" for name in ("loss", "accuracy", "balanced", "generator_loss")
    )
    examples: int = 2048
    """Validation sequences (fewer if the split holds fewer)."""
    rate: float = 0.15
    """Share of tokens that the generator fills, whatever the training rate."""
    seed: int = 0
    """Seed of the places and draws; not the run's seed."""

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise ValueError(f"evaluation.heldout_replaced.examples is {self.examples}; it must be at least 1")
        if not 0 < self.rate < 1:
            raise ValueError(f"evaluation.heldout_replaced.rate is {self.rate}; it must lie between 0 and 1")

    def needs(self) -> list[tuple[str, str]]:
        """Validation sequences in true order."""
        return [("validation", "none")]

    def measure(self, subject: Subject) -> Measured:
        """Metrics `heldout_replaced.{loss,accuracy,balanced,generator_loss}`; losses in nats a token, a target."""
        rows = []
        with torch.no_grad():
            for batch in subject.batches(
                "validation", rate=self.rate, seed=self.seed, limit=self.examples, format=self.format
            ):
                with subject.autocast():
                    scores = subject.model.scores(batch)
                assert scores.replaced_loss_B is not None
                assert scores.replaced_hits_B2 is not None
                assert scores.replaced_of_B2 is not None
                columns = (
                    scores.replaced_loss_B,
                    *scores.replaced_hits_B2.unbind(1),
                    *scores.replaced_of_B2.unbind(1),
                    scores.mlm_loss_BK.double().sum(1),
                    scores.mlm_used_BK.double().sum(1),
                )
                rows.append(torch.stack([column.double() for column in columns], dim=1).cpu().numpy())
        loss_E, kept_hits_E, put_hits_E, kept_E, put_E, mlm_E, targets_E = np.concatenate(rows).T
        name = "heldout_replaced"
        # A generator that fills every place with what stood there leaves nothing to tell.
        shares = [hits.sum() / of.sum() for hits, of in ((kept_hits_E, kept_E), (put_hits_E, put_E)) if of.sum()]
        balanced = {"value": float(np.mean(shares)), "direction": "max", "n": int(kept_E.sum() + put_E.sum())}
        return (
            Measured({f"{name}.balanced": balanced})
            | ratio(f"{name}.loss", loss_E, kept_E + put_E, "min")
            | ratio(f"{name}.accuracy", kept_hits_E + put_hits_E, kept_E + put_E, "max")
            | ratio(f"{name}.generator_loss", mlm_E, targets_E, "min")
        )
