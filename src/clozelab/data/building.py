"""Building a store: the corpus read once, encoded by one process or several, written in order, resumable.

What is written are the files of `data.store` in a folder of its own, and every few seconds `state.json`: how long each
file was after the last whole piece, and how many documents of the source stand in them. After a build that was killed,
the next one cuts the files to these lengths, skips these documents, and goes on; the result is the same to the byte.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from clozelab.data.corpus import SPLITS, CorpusOption, digest, split_of_hash
from clozelab.data.pieces import Encoded, Encoder, Piece, SourceChanged, pieces
from clozelab.data.progress import Progress
from clozelab.data.tokenizers import Tokenizer
from clozelab.data.workers import WorkerLost, Workers, processes

STORE_VERSION = 1
FILES = ("ids", "sentence_offsets", "document_offsets", "splits", "document_hashes")
COUNTS = ("documents", "sentences", "words", "tokens", "duplicates")

# Raise it when a folder that was left by older code cannot be gone on with.
_STATE_VERSION = 1
CHECKPOINT_SECONDS = 10.0


class Sizes(NamedTuple):
    """Bytes of text; what they are changes no result."""

    piece: int
    """after which a piece ends"""
    alone: int
    """below which the rest of a corpus is encoded without other processes, sooner than they would have started"""


PLAIN = Sizes(piece=4 << 20, alone=8 << 20)
SEGMENTED = Sizes(piece=1 << 19, alone=1 << 20)
"""With a word segmenter, which is some ten times slower."""

INTERRUPTIONS = (KeyboardInterrupt, SystemExit, MemoryError, WorkerLost)
"""After these the same command may succeed: the unfinished folder is kept. Any other error comes from the source, the
settings or a full disk; to go on, one of them must change, and with it the store's name, or room must be made."""


@dataclasses.dataclass
class _State:
    """What has been written, after some whole piece."""

    read: int = 0
    """documents of the source, those without a token included"""
    last: int = 0
    """content hash of the last of them"""
    bytes: int = 0
    """their canonical text in UTF-8"""
    tokens: int = 0
    sentences: int = 0
    documents: int = 0
    counts: dict[str, dict[str, int]] = dataclasses.field(
        default_factory=lambda: {split: dict.fromkeys(COUNTS, 0) for split in SPLITS}
    )

    def lengths(self, id_dtype: np.dtype, words: str | None) -> dict[str, int]:
        """Bytes of each file."""
        made = {
            "ids": self.tokens * id_dtype.itemsize,
            "sentence_offsets": (self.sentences + 1) * 8,
            "document_offsets": (self.documents + 1) * 8,
            "splits": self.documents,
            "document_hashes": self.documents * 8,
        }
        return made if words is None else made | {"words": self.tokens}


def build(corpus: CorpusOption, tokenizer: Tokenizer, folder: Path, fingerprint: str, words: str | None) -> None:
    """Make the files of a store in `folder`; goes on with what an interrupted build of the same store left there.

    Large corpora are encoded by `workers.processes()` processes ($CLOZELAB_PROCESSES); the bytes are the same for any
    number of them.

    Raises:
        ValueError: the corpus cannot be read or gives no token, or a process was killed.
        OSError: the disk is full.
    """
    try:
        _build(corpus, tokenizer, folder, fingerprint, words)
    except SourceChanged:  # what was left is of another text
        shutil.rmtree(folder)
        _build(corpus, tokenizer, folder, fingerprint, words)


def _build(corpus: CorpusOption, tokenizer: Tokenizer, folder: Path, fingerprint: str, words: str | None) -> None:
    count = processes()
    encoder = Encoder(tokenizer, corpus.language, words)
    pin = {
        "version": [_STATE_VERSION, STORE_VERSION],
        "fingerprint": fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "words": words,
    }
    with _Writer(folder, encoder, corpus, pin) as writer, Progress(f"corpus {corpus.title}") as progress:
        left = writer.state
        progress.resume(left.read, left.tokens, left.bytes)
        sizes = PLAIN if words is None else SEGMENTED
        found = pieces(corpus, sizes.piece, left.read, left.last)
        with contextlib.closing(_encoded(found, encoder, count, sizes.alone)) as every:
            for piece, documents, encoded in every:
                writer.add(encoded, documents)
                progress.add(documents, len(encoded.ids_T), encoded.bytes, piece.done)
        if writer.state.tokens == 0:
            raise ValueError(f"corpus {corpus.title} gives no token under this tokenizer")
        writer.finish()
    tokenizer.save(folder)
    meta = {
        "version": STORE_VERSION,
        "fingerprint": fingerprint,
        "corpus": corpus.title,
        "id_dtype": encoder.id_dtype.str,
        "counts": writer.state.counts,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
    (folder / "state.json").unlink(missing_ok=True)


def _encoded(
    found: Iterator[Piece], encoder: Encoder, count: int, alone: int
) -> Generator[tuple[Piece, int, Encoded], None, None]:
    """The pieces in order with what came of them: here as long as they are few, then by `count` processes."""
    first, size = list[Piece](), 0
    if count > 1:
        for piece in found:
            first.append(piece)
            size += piece.bytes
            if size >= alone:
                break
    every = _chained(first, found)
    if count == 1 or size < alone:
        for piece in every:
            documents = len(piece.texts)
            yield piece, documents, encoder(piece.texts)
        return
    with Workers(encoder, count) as workers:
        yield from workers.encode(every)


def _chained(first: list[Piece], rest: Iterator[Piece]) -> Iterator[Piece]:
    # Not itertools.chain: it would hold on to the first ones.
    first.reverse()
    while first:
        yield first.pop()
    yield from rest


class _Writer:
    """Appends encoded documents to the files of a store. To be used in a `with` block."""

    def __init__(self, folder: Path, encoder: Encoder, corpus: CorpusOption, pin: dict[str, Any]) -> None:
        self._folder, self._encoder, self._corpus, self._pin = folder, encoder, corpus, pin
        state = self._left()
        if state is None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        self.state = state or _State()
        self._files: dict[str, IO[bytes]] = {}
        self._saved = time.monotonic()
        names = (*FILES, *([] if encoder.words is None else ["words"]))
        for name in names:
            self._files[name] = (folder / f"{name}.bin").open("wb" if state is None else "r+b")
        if state is None:
            self._write("sentence_offsets", np.zeros(1, dtype="<i8"))
            self._write("document_offsets", np.zeros(1, dtype="<i8"))
        else:
            for name, length in state.lengths(encoder.id_dtype, encoder.words).items():
                self._files[name].truncate(length)
                self._files[name].seek(length)

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if isinstance(error, INTERRUPTIONS):
                self._checkpoint()
        finally:
            for file in self._files.values():
                file.close()

    def add(self, encoded: Encoded, documents: int) -> None:
        """Write what came of the next piece, of so many documents."""
        kept_D = encoded.sentences_D > 0
        hashes_D = encoded.hashes_D[kept_D]
        splits = [split_of_hash(content, self._corpus.validation, self._corpus.test) for content in hashes_D.tolist()]
        splits_D = np.asarray([SPLITS.index(split) for split in splits], dtype="<u1")
        state = dataclasses.replace(
            self.state, counts={split: dict(counts) for split, counts in self.state.counts.items()}
        )
        self._write("ids", encoded.ids_T)
        if encoded.words_T is not None:
            self._write("words", encoded.words_T)
        self._write("sentence_offsets", (state.tokens + np.cumsum(encoded.lengths_N)).astype("<i8"))
        self._write("document_offsets", (state.sentences + np.cumsum(encoded.sentences_D[kept_D])).astype("<i8"))
        self._write("splits", splits_D)
        self._write("document_hashes", hashes_D.astype("<u8"))
        for number, split in enumerate(SPLITS):
            of = np.flatnonzero(kept_D)[splits_D == number]
            counts = state.counts[split]
            counts["documents"] += len(of)
            counts["sentences"] += int(encoded.sentences_D[of].sum())
            counts["words"] += int(encoded.spaced_D[of].sum())
            counts["tokens"] += int(encoded.tokens_D[of].sum())
        state.read += documents
        state.last = int(encoded.hashes_D[-1])
        state.bytes += encoded.bytes
        state.tokens += len(encoded.ids_T)
        state.sentences += len(encoded.lengths_N)
        state.documents += len(hashes_D)
        self.state = state
        if time.monotonic() - self._saved >= CHECKPOINT_SECONDS:
            self._checkpoint()

    def finish(self) -> None:
        """Count the documents whose text was met before, and see the files onto the disk."""
        self._sync()
        # From the files, at 24 bytes a document for a moment: a set of all hashes would take some 100 bytes each,
        # all the time, and have to be kept with the state.
        hashes_D = np.fromfile(self._folder / "document_hashes.bin", dtype="<u8")
        splits_D = np.fromfile(self._folder / "splits.bin", dtype="<u1")
        repeated_D = np.ones(len(hashes_D), dtype=bool)
        repeated_D[np.unique(hashes_D, return_index=True)[1]] = False
        for number, split in enumerate(SPLITS):
            self.state.counts[split]["duplicates"] = int(np.count_nonzero(repeated_D & (splits_D == number)))

    def _write(self, name: str, array: npt.NDArray) -> None:
        # Not `tofile`, whose error for a full disk does not say that it is one.
        self._files[name].write(np.ascontiguousarray(array).data)

    def _sync(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def _checkpoint(self) -> None:
        """Make what is written so far something to go on with; the data are on the disk before the state says so."""
        self._sync()
        state = dataclasses.asdict(self.state)
        made = self._pin | {"state": state, "digest": digest(state)}
        beside = self._folder / "state.json.new"
        with beside.open("w", encoding="utf-8") as file:
            json.dump(made, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self._folder / "state.json")
        self._saved = time.monotonic()

    def _left(self) -> _State | None:
        """What an interrupted build of this very store left in the folder, if it holds together."""
        try:
            found = json.loads((self._folder / "state.json").read_text(encoding="utf-8"))
            if any(found.get(key) != value for key, value in self._pin.items()):
                return None
            if found["digest"] != digest(found["state"]):
                return None
            state = _State(**found["state"])
            lengths = state.lengths(self._encoder.id_dtype, self._encoder.words)
            if any((self._folder / f"{name}.bin").stat().st_size < length for name, length in lengths.items()):
                return None
            ends = {"sentence_offsets": state.tokens, "document_offsets": state.sentences}
            if any(self._last(name, lengths[name]) != end for name, end in ends.items()):
                return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None  # absent, or torn: not a state
        return state

    def _last(self, name: str, length: int) -> int:
        with (self._folder / f"{name}.bin").open("rb") as file:
            file.seek(length - 8)
            return int(np.frombuffer(file.read(8), dtype="<i8")[0])
