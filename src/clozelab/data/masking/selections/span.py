"""Spans of words of geometric length, cut off at ten (SpanBERT, Joshi et al. 2020, section 3.1)."""

import dataclasses

import numpy as np
import numpy.typing as npt

from clozelab.data.masking.runs import RunSelection
from clozelab.options import option


@option("masking/selection", "span")
@dataclasses.dataclass
class SpanSelection(RunSelection):
    """SpanBERT's spans; with `masking.together=true` one decision corrupts the whole span, as there."""

    p: float = 0.2
    """Of the geometric law: the mean length is 3.8 words at 0.2 and a longest span of 10."""
    longest: int = 10
    """Words of the longest span."""

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise ValueError(f"masking.selection.p is {self.p}; give a probability above 0, at most 1")
        if self.longest < 1:
            raise ValueError(f"masking.selection.longest is {self.longest}; give 1 or more words")

    @property
    def law(self) -> npt.NDArray[np.float64]:
        """[longest]: p(n) ~ p (1 - p)^(n - 1)."""
        weight_N = self.p * (1 - self.p) ** np.arange(self.longest)
        return np.asarray(weight_N / weight_N.sum(), dtype=np.float64)
