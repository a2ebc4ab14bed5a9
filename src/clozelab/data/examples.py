"""The examples of a split: a table of runs of tokens (segments) and which make up an example. All indices, no text.

`Examples.write` puts one into a folder, `read_examples` maps it into memory: ranks and workers share the pages, and
what a batch does not look up is not read.

    segments.bin            int64 [M, 2]
    segment_document.bin    int32 [M] (int64 from 2^31 documents on)
    first.bin, sizes.bin    int64 [N]
    content.bin             uint64 [N]
    meta.json               types and shapes of these, counts, split, corpus, paired
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
ARRAYS = ("segments", "segment_document", "first", "sizes", "content")
_BLOCK = 2**18  # examples that a sum over all of them looks at at a time


@dataclasses.dataclass(frozen=True)
class Examples:
    """Segments (M of them) and examples (N of them) made of successive ones, fixed for all epochs.

    Example n has the segments `first[n]` to `first[n] + sizes[n] - 1`. In a two-segment format that is A and B, which
    follow each other in one document.
    """

    segments: npt.NDArray[np.int64]
    """[M, 2]: first token and the token after the last, in the store's ids"""
    segment_document: npt.NDArray[np.integer]
    """[M]: document of each segment, never falling"""
    first: npt.NDArray[np.int64]
    """[N]: index of the first segment, rising"""
    sizes: npt.NDArray[np.int64]
    """[N]: how many segments, at least one"""
    content: npt.NDArray[np.uint64]
    """[N]: hash of the text of the document in which each example begins; equal where the texts are equal"""
    counts: dict[str, int]
    """what the format made of the split: documents, skipped_documents, segments, leftover_segments,
    truncated_sentences, lost_tokens, tokens (in the segments), sequences"""
    split: str
    corpus: str
    paired: bool
    """every example is two segments, of which a pair objective may replace or swap the second"""
    path: Path | None = None
    """the folder of which the arrays are read-only maps; None: they are in memory"""

    @property
    def n(self) -> int:
        """Number of examples."""
        return len(self.first)

    @functools.cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[M]: tokens of each segment. Made in memory for the whole split: a batch asks `lengths_of`."""
        return self.segments[:, 1] - self.segments[:, 0]

    def lengths_of(self, segment_R: Ints) -> Ints:
        """[R]: tokens of the segments `segment_R`."""
        tokens_R2 = self.segments[segment_R]
        return tokens_R2[:, 1] - tokens_R2[:, 0]

    @functools.cached_property
    def text_tokens(self) -> npt.NDArray[np.int64]:
        """[N]: tokens of text of each example, in the true order. In memory for the whole split, as `lengths`."""
        return self._text(0, self.n)

    def _text(self, begin: int, end: int) -> Ints:
        """[end - begin]: tokens of text of the examples `begin` to `end` - 1."""
        first_B, size_B = self.first[begin:end], self.sizes[begin:end]
        if len(first_B) == 0:
            return np.zeros(0, dtype=np.int64)
        base = int(first_B[0])
        tokens_M2 = self.segments[base : int(first_B[-1] + size_B[-1])]
        ends_M = np.concatenate([[0], np.cumsum(tokens_M2[:, 1] - tokens_M2[:, 0])])
        return np.asarray(ends_M[first_B - base + size_B] - ends_M[first_B - base], dtype=np.int64)

    def mean(self, of: Callable[[Ints, Ints], Ints]) -> float:
        """Mean over all examples of a function of (their segments [B], their tokens of text [B]), block by block."""
        total = 0
        for begin in range(0, self.n, _BLOCK):
            end = min(begin + _BLOCK, self.n)
            total += int(of(self.sizes[begin:end], self._text(begin, end)).sum())
        return total / self.n

    def runs(self, indices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(segments [R] of the examples `indices` [B] one after another, row [R] of each)."""
        size_B = self.sizes[indices]
        row_R = np.repeat(np.arange(len(indices)), size_B)
        nth_R = np.arange(len(row_R)) - np.repeat(np.cumsum(size_B) - size_B, size_B)
        return self.first[indices][row_R] + nth_R, row_R

    @functools.cached_property
    def by_content(self) -> "ContentPool":
        """The examples grouped by the text of their document. In memory, 24 bytes an example; NSP alone asks it."""
        # By runs of examples with one hash: there are as many as documents, of which each has many examples.
        begin_G = np.flatnonzero(np.diff(self.content, prepend=~self.content[:1]))
        size_G = np.diff(np.append(begin_G, self.n))
        hash_G = self.content[begin_G]
        by_G = np.argsort(hash_G, kind="stable")
        place_G = np.cumsum(size_G[by_G]) - size_G[by_G]
        order_N = np.arange(self.n) + np.repeat(begin_G[by_G] - place_G, size_G[by_G])
        _, class_G = np.unique(hash_G, return_inverse=True)
        sizes_C = np.zeros(int(class_G.max(initial=-1)) + 1, dtype=np.int64)
        np.add.at(sizes_C, class_G, size_G)
        firsts_C = np.cumsum(sizes_C) - sizes_C
        return ContentPool(order_N, np.repeat(firsts_C[class_G], size_G), np.repeat(sizes_C[class_G], size_G))

    def write(self, folder: Path) -> None:
        """Put the examples into an existing, empty folder.

        Raises:
            OSError: there is no room, or no permission.
        """
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in ARRAYS}
        for name, array in arrays.items():
            # Not ndarray.tofile, whose error of a full disk has no errno.
            with (folder / f"{name}.bin").open("wb") as file:
                file.write(array.astype(array.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8).data)
        meta = {
            "arrays": {name: [array.dtype.newbyteorder("<").str, list(array.shape)] for name, array in arrays.items()},
            "counts": self.counts,
            "split": self.split,
            "corpus": self.corpus,
            "paired": self.paired,
        }
        (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")

    def __reduce__(self) -> tuple[Callable[..., "Examples"], tuple[Any, ...]]:
        # A worker process opens the files itself; and what was derived from the arrays never travels.
        if self.path is not None:
            return read_examples, (self.path,)
        return Examples, tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def read_examples(folder: Path) -> Examples:
    """Open the examples in a folder: read-only maps, nothing is loaded.

    Raises:
        ValueError: something is missing, or a file has another size than was written.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        arrays: dict[str, Any] = {name: _mapped(folder / f"{name}.bin", *meta["arrays"][name]) for name in ARRAYS}
        rest = {name: meta[name] for name in ("counts", "split", "corpus", "paired")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the examples in {folder} cannot be read ({error}): delete that folder") from None
    return Examples(**arrays, **rest, path=folder)


def _mapped(path: Path, dtype: str, shape: list[int]) -> npt.NDArray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if path.stat().st_size != size:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, not {size}")
    # As a plain array over the map: numpy's memmap class makes every small index slow.
    return np.memmap(path, dtype=dtype, mode="r", shape=tuple(shape)).view(np.ndarray)


@dataclasses.dataclass(frozen=True)
class ContentPool:
    """Examples in an order in which those of equal documents stand together."""

    order: npt.NDArray[np.int64]
    """[N]: example at each place of the pool"""
    first: npt.NDArray[np.int64]
    """[N]: place where the group of example n begins"""
    size: npt.NDArray[np.int64]
    """[N]: places its group takes"""
