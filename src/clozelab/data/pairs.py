"""Pair objectives: which segment stands second, and the label that says so.

`none`  the true order, nothing to tell (RoBERTa).
`next`  next sentence prediction (BERT): half of the second segments come from another document.
`order` sentence order prediction (ALBERT): half of the pairs are swapped.

Draws are keyed by (seed, "pair", epoch, example): they depend on nothing else.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from clozelab import seeds
from clozelab.data.examples import Examples
from clozelab.options import option, registered

Drawn = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]
SameText = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.NDArray[np.bool_]]


class PairObjective:
    """What an option of the group `pair` can do."""

    name: ClassVar[str]
    labels: ClassVar[tuple[str, str] | None]
    """what label 0 and label 1 mean; None where there is nothing to learn"""

    def check(self, examples: Examples) -> None:
        """Raise ValueError where the examples cannot carry this objective."""
        if self.labels is not None and not examples.paired:
            raise ValueError(
                f"pair objective {self.name} needs a format of two segments (segment_pair, sentence_pair); this one "
                "has one: choose such a format, or task.pair=none"
            )

    def draw(
        self,
        examples: Examples,
        indices: npt.NDArray[np.int64],
        seed: int,
        epoch: int,
        stream: str = "pair",
        same_text: SameText | None = None,
    ) -> Drawn:
        """(first, second, labels), each int64 [B]: the segments of the examples `indices` [B] in this epoch.

        `same_text` says of two lists of segments [B] which hold the same tokens.
        """
        raise NotImplementedError


@option("pair", "none")
@dataclasses.dataclass
class NoPair(PairObjective):
    """Both segments in their true order; label 0 everywhere and no loss."""

    name = "none"
    labels = None

    def draw(
        self,
        examples: Examples,
        indices: npt.NDArray[np.int64],
        seed: int,
        epoch: int,
        stream: str = "pair",
        same_text: SameText | None = None,
    ) -> Drawn:
        first_B = examples.first[indices]
        return first_B, first_B + 1, np.zeros(len(indices), dtype=np.int64)


@option("pair", "next")
@dataclasses.dataclass
class NextPair(PairObjective):
    """NSP: with probability 1/2 the second segment is replaced by a second segment of another document.

    The stranger is drawn from the examples' *second* segments, so that a second segment looks the same under both
    labels even where documents are short and second segments are mostly their (shorter) ends. Documents with equal
    texts count as one document: the true continuation can never come back as a stranger. Where another document goes on
    with the very same tokens (a formula, or texts that differ in case alone), its segment is no stranger: label 0.
    """

    name = "next"
    labels = ("next", "random")

    def check(self, examples: Examples) -> None:
        super().check(examples)
        if examples.by_content.size[0] == examples.n:
            raise ValueError(
                f"pair objective next (NSP) needs two documents with different texts, but the examples of the "
                f"{examples.split} split of corpus {examples.corpus} come from one; give more documents, or use order"
            )

    def draw(
        self,
        examples: Examples,
        indices: npt.NDArray[np.int64],
        seed: int,
        epoch: int,
        stream: str = "pair",
        same_text: SameText | None = None,
    ) -> Drawn:
        self.check(examples)
        coin_B, where_B = seeds.uniform(seed, stream, (epoch,), indices, 2).T
        pool = examples.by_content
        size_B, group_B = pool.size[indices], pool.first[indices]
        # A place among those outside the own group: count places as if the group were not there, then step over it.
        place_B = np.floor(where_B * (examples.n - size_B)).astype(np.int64)
        place_B += np.where(place_B >= group_B, size_B, 0)
        labels_B = (coin_B < 0.5).astype(np.int64)
        first_B = examples.first[indices]
        stranger_B = examples.first[pool.order[place_B]] + 1
        if same_text is not None:
            labels_B &= ~same_text(stranger_B, first_B + 1)
        return first_B, np.where(labels_B == 1, stranger_B, first_B + 1), labels_B


@option("pair", "order")
@dataclasses.dataclass
class OrderPair(PairObjective):
    """SOP: with probability 1/2 the two segments are swapped."""

    name = "order"
    labels = ("in order", "swapped")

    def draw(
        self,
        examples: Examples,
        indices: npt.NDArray[np.int64],
        seed: int,
        epoch: int,
        stream: str = "pair",
        same_text: SameText | None = None,
    ) -> Drawn:
        labels_B = (seeds.uniform(seed, stream, (epoch,), indices, 1)[:, 0] < 0.5).astype(np.int64)
        first_B = examples.first[indices]
        return first_B + labels_B, first_B + 1 - labels_B, labels_B


def pair_objective(name: str) -> PairObjective:
    """The pair objective of that name.

    Raises:
        ValueError: there is none; names those there are.
    """
    known = registered("pair")
    if name not in known:
        raise ValueError(f"no pair objective {name}; there are {', '.join(known)}")
    made = known[name]()
    assert isinstance(made, PairObjective)
    return made
