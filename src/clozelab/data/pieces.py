"""From documents to arrays, a piece at a time: the part of building a store that any process can do.

A piece is a few whole documents in succession. What comes of a document does not depend on the piece it is in, nor on
the process that encodes it, so that pieces put one after another are the store.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from clozelab.data.corpus import ContentHash, CorpusOption, canonical, content_hash, paragraphs, sentences_of
from clozelab.data.segmenter import encode_marked
from clozelab.data.tokenizers import Tokenizer

BATCH = 8192
"""Sentences encoded at a time: what bounds the memory that a long document needs."""


class Piece(NamedTuple):
    """Whole documents as their source has them."""

    texts: list[bytes]
    """UTF-8 (lone surrogates let through): smaller than `str` where one sign of the text is a rare one"""
    bytes: int
    """their sum"""
    done: float | None
    """share of the source read when the last of them was"""


class Encoded(NamedTuple):
    """What a store keeps of D documents with N sentences of T tokens in all."""

    ids_T: npt.NDArray[np.unsignedinteger]
    """uint16 | uint32 [T], little-endian"""
    words_T: npt.NDArray[np.bool_] | None
    """bool [T]: tokens that begin a word; only where a segmenter was asked"""
    lengths_N: npt.NDArray[np.int64]
    """int64 [N]: tokens of each sentence, none without"""
    hashes_D: npt.NDArray[np.uint64]
    """uint64 [D]: content hash; here and below, documents without a token are still in"""
    sentences_D: npt.NDArray[np.int64]
    """int64 [D]: sentences with tokens"""
    spaced_D: npt.NDArray[np.int64]
    """int64 [D]: words, as parted by spaces"""
    tokens_D: npt.NDArray[np.int64]
    """int64 [D]"""
    bytes: int
    """bytes of the canonical texts in UTF-8"""


class SourceChanged(Exception):
    """The documents that an interrupted build has written are no longer those of the source."""


def pieces(corpus: CorpusOption, size: int, skip: int = 0, last: int = 0) -> Iterator[Piece]:
    """The corpus in pieces of at least `size` bytes (the last may be smaller).

    Args:
        skip: documents at the beginning that are left out.
        last: content hash of the last of them.

    Raises:
        SourceChanged: another document stands there. Of a set on the hub no fingerprint tells that it has changed.
    """
    texts, total, done = list[bytes](), 0, None
    source = corpus.raw()
    if skip:
        skipped = next(itertools.islice(source, skip - 1, None), None)
        if skipped is None or content_hash(canonical(skipped.text)) != last:
            raise SourceChanged
    for raw in source:
        texts.append(raw.text.encode("utf-8", "surrogatepass"))
        total, done = total + len(texts[-1]), raw.done
        del raw  # with its text: while a piece is worked on, the documents in it are here once
        if total >= size:
            yield Piece(texts, total, done)
            texts, total = [], 0
    if texts:
        yield Piece(texts, total, done)


@dataclasses.dataclass(frozen=True)
class Encoder:
    """What is done to every document: canonical form, sentences, ids."""

    tokenizer: Tokenizer
    language: str
    """ISO 639 code for the sentence segmenter"""
    words: str | None
    """segmenter that says where words begin"""

    @property
    def id_dtype(self) -> np.dtype:
        """Type of the ids on disk."""
        return self.tokenizer.id_dtype.newbyteorder("<")

    def __call__(self, texts: list[bytes]) -> Encoded:
        """Encode documents. The list is emptied on the way, so that a long text is let go when it has been read."""
        count = len(texts)
        hashes_D = np.zeros(count, dtype=np.uint64)
        per_document_3D = np.zeros((3, count), dtype=np.int64)
        parts: list[tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.bool_] | None, npt.NDArray[np.int64]]] = []
        batch, owners, size = list[str](), list[int](), 0

        def flush() -> None:
            ids_T, words_T, lengths_N = self._encode(batch[:BATCH])
            owners_N = np.asarray(owners[:BATCH], dtype=np.int64)
            spaced_N = np.asarray([sentence.count(" ") + 1 for sentence in batch[:BATCH]], dtype=np.int64)
            for row, values_N in zip(per_document_3D, (lengths_N > 0, spaced_N, lengths_N), strict=True):
                np.add.at(row, owners_N, values_N)
            # A sentence of signs that the tokenizer drops leaves nothing behind.
            parts.append((ids_T.astype(self.id_dtype), words_T, lengths_N[lengths_N > 0]))
            del batch[:BATCH], owners[:BATCH]

        texts.reverse()
        for d in range(count):
            content = ContentHash()
            for paragraph in paragraphs(texts.pop().decode("utf-8", "surrogatepass")):
                content.add(paragraph)
                found = sentences_of(paragraph, self.language)
                batch += found
                owners += [d] * len(found)
                while len(batch) >= BATCH:
                    flush()
            hashes_D[d] = content.value
            size += content.bytes
        flush()
        ids, marks, lengths = zip(*parts, strict=True)
        return Encoded(
            ids_T=np.concatenate(ids),
            words_T=None if self.words is None else np.concatenate(marks),
            lengths_N=np.concatenate(lengths),
            hashes_D=hashes_D,
            sentences_D=per_document_3D[0],
            spaced_D=per_document_3D[1],
            tokens_D=per_document_3D[2],
            bytes=size,
        )

    def _encode(
        self, batch: list[str]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_] | None, npt.NDArray[np.int64]]:
        if self.words is not None:
            return encode_marked(self.tokenizer.inner, batch)
        ids_T, lengths_N = self.tokenizer.encode_flat(batch)
        return ids_T, None, lengths_N
