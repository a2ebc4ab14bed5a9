"""The examples of a split: a table of runs of tokens (segments) and which make up an example. All indices, no text."""

import dataclasses
import functools

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True)
class Examples:
    """Segments (M of them) and examples (N of them) made of successive ones, fixed for all epochs.

    Example n has the segments `first[n]` to `first[n] + sizes[n] - 1`. In a two-segment format that is A and B, which
    follow each other in one document.
    """

    segments: npt.NDArray[np.int64]
    """[M, 2]: first token and the token after the last, in the store's ids"""
    segment_document: npt.NDArray[np.int64]
    """[M]: document of each segment, never falling"""
    first: npt.NDArray[np.int64]
    """[N]: index of the first segment, rising"""
    sizes: npt.NDArray[np.int64]
    """[N]: how many segments"""
    content: npt.NDArray[np.uint64]
    """[N]: hash of the text of the document in which each example begins; equal where the texts are equal"""
    counts: dict[str, int]
    """what the format made of the split: documents, skipped_documents, segments, leftover_segments,
    truncated_sentences, lost_tokens, tokens (in the segments), sequences"""
    split: str
    corpus: str
    paired: bool
    """every example is two segments, of which a pair objective may replace or swap the second"""

    @property
    def n(self) -> int:
        """Number of examples."""
        return len(self.first)

    @functools.cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[M]: tokens of each segment."""
        return self.segments[:, 1] - self.segments[:, 0]

    @functools.cached_property
    def text_tokens(self) -> npt.NDArray[np.int64]:
        """[N]: tokens of text of each example, in the true order."""
        ends_M = np.concatenate([[0], np.cumsum(self.lengths)])
        return np.asarray(ends_M[self.first + self.sizes] - ends_M[self.first], dtype=np.int64)

    def runs(self, indices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(segments [R] of the examples `indices` [B] one after another, row [R] of each)."""
        size_B = self.sizes[indices]
        row_R = np.repeat(np.arange(len(indices)), size_B)
        nth_R = np.arange(len(row_R)) - np.repeat(np.cumsum(size_B) - size_B, size_B)
        return self.first[indices][row_R] + nth_R, row_R

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
