"""Replaced-token detection (ELECTRA, Clark et al. 2020, section 2).

A small generator fills the masked places with tokens of its own; the model itself, the discriminator, tells of every
token whether it stood in the text. Both learn together,

    loss = L_mlm(generator) + weight * L_replaced(discriminator)

and nothing flows back from the second through the tokens drawn. What a generator puts right counts as not replaced.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from clozelab.data.task import TaskOption
from clozelab.options import option

if TYPE_CHECKING:
    from clozelab.models.encoder import EncoderOption
    from clozelab.models.pretraining import PretrainingModel

TIES = ("none", "embeddings", "all")


@option("task", "replaced")
@dataclasses.dataclass
class ReplacedTask(TaskOption):
    """Which tokens did a generator put in? The discriminator is `model`; a pair objective is told by it."""

    samples: ClassVar[bool] = True
    weight: float = 50.0
    """Weight of the discriminator's loss, a mean over all tokens, beside the generator's, a mean over targets."""
    generator_width: float = 0.25
    """Heads and widths of the generator as a share of the model's, to the nearest whole head."""
    generator_depth: float = 1.0
    """Layers of the generator as a share of the model's."""
    tie: str = "embeddings"
    """What generator and discriminator share: none, embeddings, or all (section 3.2)."""
    temperature: float = 1.0
    """The generator's logits are divided by it before a token is drawn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"task.weight is {self.weight}; give 0 or more")
        for key in ("generator_width", "generator_depth"):
            if not 0 < getattr(self, key) <= 1:
                raise ValueError(f"task.{key} is {getattr(self, key)}; give a share above 0, at most 1")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"task.temperature is {self.temperature}; give a number above 0")
        if self.tie not in TIES:
            raise ValueError(f"task.tie is {self.tie}; give one of {', '.join(TIES)}")
        if self.tie == "all" and (self.generator_width, self.generator_depth) != (1, 1):
            raise ValueError(
                "task.tie=all makes generator and discriminator one encoder; "
                "it needs task.generator_width=1 task.generator_depth=1"
            )

    @property
    def weights(self) -> dict[str, float]:
        return super().weights | {"replaced": self.weight}

    def tells(self, masking: Any) -> str:
        return "replaced"

    def check(self, masking: Any) -> None:
        super().check(masking)
        if masking.causal:
            raise ValueError("task=replaced fills masked places, and masking=causal masks none; choose masking=dynamic")
        if masking.predicted < 1:
            raise ValueError(
                f"masking.predicted is {masking.predicted}: task=replaced fills every place that was chosen; "
                "choose masking.predicted=1"
            )

    def generator(self, model: "EncoderOption") -> "EncoderOption":
        heads = max(1, round(model.heads * self.generator_width))
        # Each key and value head serves as many queries as in the model, where whole heads allow it.
        served = model.heads // model.key_value_heads
        return dataclasses.replace(
            model,
            heads=heads,
            hidden=heads * (model.hidden // model.heads),
            kv_heads=None if model.kv_heads is None else max(1, heads // served) if heads % served == 0 else 1,
            ffn=max(1, round(model.ffn * self.generator_width)),
            layers=_layers(model, self.generator_depth),
            embedding=model.embedding_size,
            project=None if model.project is False else model.project,
            output=None if model.tie_output else model.output,
        )

    def build(
        self,
        model: "EncoderOption",
        vocab_size: int,
        pad_id: int,
        causal: bool = False,
        special_ids: Iterable[int] = (),
    ) -> "PretrainingModel":
        from clozelab.models.replaced import ReplacedTokenModel

        return ReplacedTokenModel(
            model,
            self.generator(model),
            vocab_size,
            pad_id,
            pair=self.has_pair,
            tie=self.tie,
            temperature=self.temperature,
            special_ids=special_ids,
        )


def _layers(model: "EncoderOption", depth: float) -> int:
    """The share of the model's layers, a multiple of the units in which it shares parameters."""
    unit = model.share_groups * model.share_inner
    return max(1, round(model.layers * depth / unit)) * unit
