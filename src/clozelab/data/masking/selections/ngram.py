"""Runs of up to three words, longer ones less often: p(n) ~ 1/n (Lan et al. 2020, section 4.1)."""

import dataclasses

import numpy as np
import numpy.typing as npt

from clozelab.data.masking.runs import RunSelection
from clozelab.options import option


@option("masking/selection", "ngram")
@dataclasses.dataclass
class NgramSelection(RunSelection):
    """ALBERT's n-gram masking, over whole words."""

    longest: int = 3
    """N: words of the longest run."""

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise ValueError(f"masking.selection.longest is {self.longest}; give 1 or more words")

    @property
    def law(self) -> npt.NDArray[np.float64]:
        """[N]: p(n) = (1/n) / sum of 1/k."""
        inverse_N = 1 / np.arange(1, self.longest + 1)
        return np.asarray(inverse_N / inverse_N.sum(), dtype=np.float64)
