"""The examples of a split: a table of token segments and which of them belong together. All indices, no text."""

import dataclasses
import functools

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True)
class Examples:
    """Segments (M of them) and pairs of adjacent segments (N of them), fixed for all epochs.

    Example n is segment A = `pairs[n]` and segment B = `pairs[n] + 1`, which follow each other in one document.
    """

    segments: npt.NDArray[np.int64]
    """[M, 2]: first token and the token after the last, in the store's ids"""
    segment_document: npt.NDArray[np.int64]
    """[M]: document of each segment, never falling"""
    pairs: npt.NDArray[np.int64]
    """[N]: index of A, rising"""
    content: npt.NDArray[np.uint64]
    """[N]: hash of the text of each example's document; equal where the texts are equal"""
    counts: dict[str, int]
    """what the format made of the split: documents, skipped_documents, segments, leftover_segments,
    truncated_sentences, lost_tokens, tokens (in the segments), pairs"""
    split: str
    corpus: str

    @property
    def n(self) -> int:
        """Number of examples."""
        return len(self.pairs)

    @functools.cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[M]: tokens of each segment."""
        return self.segments[:, 1] - self.segments[:, 0]

    @functools.cached_property
    def by_content(self) -> "ContentPool":
        """The examples grouped by the text of their document."""
        order_N = np.argsort(self.content, kind="stable")
        _, class_N = np.unique(self.content, return_inverse=True)
        sizes_C = np.bincount(class_N)
        firsts_C = np.cumsum(sizes_C) - sizes_C
        return ContentPool(order_N, firsts_C[class_N], sizes_C[class_N])


@dataclasses.dataclass(frozen=True)
class ContentPool:
    """Examples in an order in which those of equal documents stand together."""

    order: npt.NDArray[np.int64]
    """[N]: example at each place of the pool"""
    first: npt.NDArray[np.int64]
    """[N]: place where the group of example n begins"""
    size: npt.NDArray[np.int64]
    """[N]: places its group takes"""
