"""What every yardstick gets and gives.

A yardstick is an option of the group `evaluation` with one method, `measure(subject) -> Measured`. It is fixed once per
corpus and its own seed: every arm and every seed of a claim is measured on the same masked positions and the same
pairs.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clozelab.models.pretraining import PretrainingModel


@dataclass
class Measured:
    """Metrics and the per-example scores behind them."""

    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> {value, direction ("min" | "max"), n}; the cell adds which yardstick it was."""
    scores: dict[str, npt.NDArray[np.floating[Any]]] = field(default_factory=dict)
    """Name -> one number an example [N], in the order of the yardstick's examples."""


@dataclass
class Subject:
    """A trained model and the data it is measured on."""

    model: PretrainingModel
    pair_objective: str
    """What the model's pair head (if it has one) was trained on: none, next or order."""
    batches: Callable[..., Iterator[dict[str, Tensor]]]
    """`batches(split, pair=..., masked=..., seed=..., limit=..., rate=..., causal=...)`: the fixed view of a split."""
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]]

    def encode(self, batch: dict[str, Tensor]) -> Tensor:
        """hidden_BSH of the frozen encoder, in float32."""
        with self.autocast():
            hidden_BSH: Tensor = self.model.encoder(batch["input_ids"], batch["segment_ids"], batch["attention_mask"])
        return hidden_BSH.float()


class Yardstick(Protocol):
    """The interface of an `evaluation` option."""

    causal: ClassVar[bool]
    """It measures models that read from left to right; False: those that read both ways."""

    def needs(self) -> list[tuple[str, str]]:
        """(split, pair objective) of every view it will ask for: checked before anything is trained."""
        ...

    def measure(self, subject: Subject) -> Measured:
        """Evaluate a model that is in evaluation mode, under no_grad unless the yardstick trains a probe."""
        ...
