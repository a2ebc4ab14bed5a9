"""The task: what is learnt of a sequence, and what beside it of its two segments.

A token objective (told of single tokens) and a pair objective compose freely; which token objective it is says the
option: `cloze` here (with `masking=causal` it is the next token that is told), `replaced` in `data.replaced`.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from clozelab.data.pairs import PairObjective, pair_objective
from clozelab.options import option

if TYPE_CHECKING:
    from clozelab.models.encoder import EncoderOption
    from clozelab.models.pretraining import PretrainingModel


@option("task", "cloze")
@dataclasses.dataclass
class TaskOption:
    """Masked words, and a pair objective or none."""

    samples: ClassVar[bool] = False
    """The model draws tokens: batches bring it one uniform number a target."""
    pair: str = "none"
    """Pair objective: none, next (NSP) or order (SOP)."""
    pair_weight: float = 1.0
    """Weight of the pair loss beside that of the tokens."""

    def __post_init__(self) -> None:
        try:
            pair_objective(self.pair)
        except ValueError as error:
            raise ValueError(f"task.pair: {error}") from None
        if not (math.isfinite(self.pair_weight) and self.pair_weight >= 0):
            raise ValueError(f"task.pair_weight is {self.pair_weight}; give 0 or more")

    @property
    def objective(self) -> PairObjective:
        """The pair objective itself."""
        return pair_objective(self.pair)

    @property
    def has_pair(self) -> bool:
        """Whether there is something to learn of the two segments."""
        return self.objective.labels is not None

    @property
    def weights(self) -> dict[str, float]:
        """Of each part of the loss, a mean over the whole step: `mlm` over targets, `pair` over sequences."""
        return {"mlm": 1.0, "pair": self.pair_weight}

    def tells(self, masking: Any) -> str:
        """What the model learns to tell of a token, for yardsticks: `hidden`, `next` or `replaced`."""
        return "next" if masking.causal else "hidden"

    def check(self, masking: Any) -> None:
        """Raise ValueError where task and masking cannot be had together."""
        if masking.causal and self.has_pair:
            raise ValueError(
                f"task.pair={self.pair} is told from the first position, which under masking=causal has seen nothing; "
                "choose task.pair=none"
            )

    def generator(self, model: "EncoderOption") -> "EncoderOption | None":
        """The encoder that makes the model's input; None: it reads what the data hold."""
        return None

    def build(
        self,
        model: "EncoderOption",
        vocab_size: int,
        pad_id: int,
        causal: bool = False,
        special_ids: Iterable[int] = (),
    ) -> "PretrainingModel":
        """The model with the heads that the task uses.

        Args:
            model: the encoder.
            vocab_size: V.
            pad_id: id of the padding token.
            causal: positions see only what comes before them.
            special_ids: tokens that no model may put into a text.
        """
        from clozelab.models.pretraining import PretrainingModel

        return PretrainingModel(model, vocab_size, pad_id, pair=self.has_pair, causal=causal)
