"""What every yardstick gets and gives.

A yardstick is an option of the group `evaluation` with one method, `measure(subject) -> Measured`. It is fixed once per
corpus and its own seed: every arm and every seed of a claim is measured on the same masked positions and the same
pairs.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clozelab.data.format import FormatOption, format_named
from clozelab.models.pretraining import PretrainingModel


@dataclass
class Measured:
    """Metrics and the per-example scores behind them."""

    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> {value, direction ("min" | "max"), n}; the cell adds which yardstick it was."""
    scores: dict[str, npt.NDArray[np.floating[Any]]] = field(default_factory=dict)
    """Name -> one number an example [N], in the order of the yardstick's examples."""

    def __or__(self, other: "Measured") -> "Measured":
        """Both together."""
        return Measured(self.metrics | other.metrics, self.scores | other.scores)


@dataclass
class Subject:
    """A trained model and the data it is measured on."""

    model: PretrainingModel
    pair_objective: str
    """What the model's pair head (if it has one) was trained on: none, next or order."""
    batches: Callable[..., Iterator[dict[str, Tensor]]]
    """The fixed view of a split: `batches(split, pair=..., masked=..., seed=..., limit=..., rate=..., causal=...,
    format=...)`."""
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]]

    def encode(self, batch: dict[str, Tensor]) -> Tensor:
        """hidden_BSH of the frozen encoder, in float32."""
        with self.autocast():
            hidden_BSH: Tensor = self.model.encoder(batch["input_ids"], batch["segment_ids"], batch["attention_mask"])
        return hidden_BSH.float()


@dataclass
class YardstickOption:
    """What an option of the group `evaluation` can do."""

    tells: ClassVar[tuple[str, ...]]
    """What the models that it measures tell of a token (see `TaskOption.tells`)."""
    gives: ClassVar[tuple[str, ...]] = ()
    """Names of the metrics that it can give; empty: not known before it has measured."""
    format: str | None = field(default=None, kw_only=True)
    """Format in which it sees the text, with that format's default settings and the run's length; null: the run's own.
    Name one where arms differ in their format: only then are they measured on the same sequences."""

    def sees(self, format_: FormatOption) -> FormatOption:
        """The format of its sequences in a run of the format `format_`.

        Raises:
            ValueError: there is none of that name.
        """
        return format_ if self.format is None else format_named(self.format, format_.max_length)

    def needs(self) -> list[tuple[str, str]]:
        """(split, pair objective) of every view it will ask for: checked before anything is trained."""
        raise NotImplementedError

    def measure(self, subject: Subject) -> Measured:
        """Evaluate a model that is in evaluation mode, under no_grad unless the yardstick trains a probe."""
        raise NotImplementedError
