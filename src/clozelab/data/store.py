"""The store: a corpus as ids on disk, built once, mapped into memory by every run, worker and rank.

`<cache>/<data fingerprint>/` holds

    ids.bin                 uint16 | uint32 [T]   the sentences' ids, one after another, without special tokens
    sentence_offsets.bin    int64 [N + 1]         sentence n is ids[sentence_offsets[n] : sentence_offsets[n + 1]]
    document_offsets.bin    int64 [D + 1]         document d has the sentences document_offsets[d : d + 2]
    splits.bin              uint8 [D]             0 train, 1 validation, 2 test
    document_hashes.bin     uint64 [D]            equal where two documents have equal texts
    words.bin               bool [T]              which tokens begin a word; only where a segmenter said so
    tokenizer.json, meta.json

It is written in a stream (never the whole corpus in memory) into a folder beside its place, under a file lock, and
moved into place by one rename: whoever finds the folder finds it complete.
"""

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import filelock
import numpy as np
import numpy.typing as npt

from clozelab.data.corpus import SPLITS, CorpusOption, digest, sentences
from clozelab.data.segmenter import marked
from clozelab.data.tokenizers import Tokenizer, TokenizerOption, read_tokenizer

STORE_VERSION = 1
FILES = ("ids", "sentence_offsets", "document_offsets", "splits", "document_hashes")
COUNTS = ("documents", "sentences", "words", "tokens", "duplicates")
_BATCH = 8192  # sentences encoded and written at a time
_ROOM = 64 * 2**20  # bytes that must be free before anything is built


def cache_dir() -> Path:
    """Where built data are kept: $CLOZELAB_CACHE, or ~/.cache/clozelab."""
    return Path(os.environ.get("CLOZELAB_CACHE") or "~/.cache/clozelab").expanduser()


@dataclasses.dataclass(frozen=True)
class Store:
    """A built corpus. The arrays are read-only maps of the files; none is loaded."""

    path: Path
    ids: npt.NDArray[np.unsignedinteger]
    """uint16 or uint32 [T]"""
    sentence_offsets: npt.NDArray[np.int64]
    """int64 [N + 1]: token index"""
    document_offsets: npt.NDArray[np.int64]
    """int64 [D + 1]: sentence index"""
    splits: npt.NDArray[np.uint8]
    """uint8 [D]: index into `SPLITS`"""
    document_hashes: npt.NDArray[np.uint64]
    """uint64 [D]"""
    words: npt.NDArray[np.bool_] | None
    """bool [T]: tokens that begin a word; None: the vocabulary tells"""
    tokenizer: Tokenizer
    counts: dict[str, dict[str, int]]
    """split -> documents, sentences, words, tokens, duplicates (documents whose text was met before, in any split)"""
    corpus: str
    """name of the corpus, for messages"""
    fingerprint: str
    hit: bool = True
    """whether the store was there already when it was opened"""

    def documents_of(self, split: str) -> npt.NDArray[np.int64]:
        """Indices of the documents of a split, in corpus order."""
        if split not in SPLITS:
            raise ValueError(f"no split {split}; there are {', '.join(SPLITS)}")
        return np.flatnonzero(self.splits == SPLITS.index(split))

    def sentence(self, n: int) -> npt.NDArray[np.int64]:
        """Ids of sentence n."""
        return np.asarray(self.ids[self.sentence_offsets[n] : self.sentence_offsets[n + 1]], dtype=np.int64)

    def word_starts(self, ids_BS: npt.NDArray[np.int64], source_BS: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """[B, S]: True where a word begins; of what is not text (source -1) the values mean nothing."""
        if self.words is not None:
            return self.words[np.maximum(source_BS, 0)]
        starts = self.tokenizer.word_starts
        assert starts is not None
        return starts(ids_BS)

    def __reduce__(self) -> tuple[Callable[[Path], "Store"], tuple[Path]]:
        # A worker process opens the files itself; a pickled memory map would carry all its bytes.
        return read_store, (self.path,)


def data_fingerprint(corpus: CorpusOption, tokenizer: TokenizerOption) -> str:
    """The data half of a run's identity: corpus bytes, what is done to them, tokenizer. Builds nothing."""
    source = corpus.fingerprint()
    return digest(STORE_VERSION, source, tokenizer.fingerprint(source))


def open_store(corpus: CorpusOption, tokenizer: TokenizerOption, cache: Path | None = None) -> Store:
    """The store of a corpus under a tokenizer; built if it is not there yet, by one process at a time.

    Raises:
        ValueError: the corpus or the tokenizer cannot be read, the training split is empty, or the cache has no room.
    """
    cache = cache_dir() if cache is None else cache
    fingerprint = data_fingerprint(corpus, tokenizer)
    folder = cache / fingerprint
    if (folder / "meta.json").is_file():
        return read_store(folder)
    with _room(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(cache / f"{fingerprint}.lock"):
            if (folder / "meta.json").is_file():
                return read_store(folder)
            if shutil.disk_usage(cache).free < _ROOM:
                raise OSError(errno.ENOSPC, "less than 64 MiB free")
            source = corpus.fingerprint()
            made = tokenizer.load(lambda: corpus.texts("train"), source, cache)
            for left in cache.glob(f".{fingerprint}.*"):  # of a process that was killed; the lock is ours
                shutil.rmtree(left, ignore_errors=True)
            beside = cache / f".{fingerprint}.{os.getpid()}"
            try:
                beside.mkdir()
                _build(corpus, made, beside, fingerprint, tokenizer.words)
                os.replace(beside, folder)
            finally:
                shutil.rmtree(beside, ignore_errors=True)
    return dataclasses.replace(read_store(folder), hit=False)


def read_store(folder: Path) -> Store:
    """Open a store by its folder, building nothing."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))

    def mapped(name: str, dtype: str) -> Any:
        # As a plain array over the map: numpy's memmap class makes every small index slow.
        return np.memmap(folder / f"{name}.bin", dtype=dtype, mode="r").view(np.ndarray)

    return Store(
        path=folder,
        ids=mapped("ids", meta["id_dtype"]),
        sentence_offsets=mapped("sentence_offsets", "<i8"),
        document_offsets=mapped("document_offsets", "<i8"),
        splits=mapped("splits", "<u1"),
        document_hashes=mapped("document_hashes", "<u8"),
        words=mapped("words", "?") if (folder / "words.bin").is_file() else None,
        tokenizer=read_tokenizer(folder / "tokenizer.json"),
        counts=meta["counts"],
        corpus=meta["corpus"],
        fingerprint=meta["fingerprint"],
    )


@contextmanager
def _room(cache: Path) -> Iterator[None]:
    """Say in one line what is wrong with the cache folder, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(f"no room in the cache folder {cache}: free some, or set CLOZELAB_CACHE") from None
        if error.errno in (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EPERM):
            reason = os.strerror(error.errno)
            raise ValueError(f"cannot write to the cache folder {cache} ({reason}): set CLOZELAB_CACHE") from None
        raise


class _Writer:
    """Appends encoded documents to the files of a store."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, words: str | None) -> None:
        self.tokenizer, self.words = tokenizer, words
        self.files: dict[str, IO[bytes]] = {
            name: (folder / f"{name}.bin").open("wb") for name in (*FILES, *([] if words is None else ["words"]))
        }
        self.tokens = self.sentences = 0
        self.counts = {split: dict.fromkeys(COUNTS, 0) for split in SPLITS}
        self.seen: set[int] = set()
        self._write("sentence_offsets", np.zeros(1, dtype="<i8"))
        self._write("document_offsets", np.zeros(1, dtype="<i8"))

    def _write(self, name: str, array: npt.NDArray) -> None:
        array.tofile(self.files[name])

    def add(self, texts: list[str], documents: list[tuple[str, int, int]]) -> None:
        """Write whole documents: their sentences, and per document (split, content hash, number of sentences)."""
        ids_T, lengths_N = self.tokenizer.encode_flat(texts)
        words_N = np.fromiter((text.count(" ") + 1 for text in texts), dtype=np.int64, count=len(texts))
        self._write("ids", ids_T.astype(self.tokenizer.id_dtype.newbyteorder("<")))
        if self.words is not None:
            self._write("words", marked(self.tokenizer.inner, texts))
        first = 0
        kept_D, splits_D, hashes_D = [], [], []
        for split, content, n in documents:
            here = slice(first, first + n)
            first += n
            kept = int(np.count_nonzero(lengths_N[here]))
            if kept == 0:
                continue
            counts = self.counts[split]
            counts["documents"] += 1
            counts["sentences"] += kept
            counts["words"] += int(words_N[here].sum())
            counts["tokens"] += int(lengths_N[here].sum())
            counts["duplicates"] += content in self.seen
            self.seen.add(content)
            kept_D.append(kept)
            splits_D.append(SPLITS.index(split))
            hashes_D.append(content)
        lengths_N = lengths_N[lengths_N > 0]  # a sentence of signs that the tokenizer drops leaves nothing behind
        self._write("sentence_offsets", (self.tokens + np.cumsum(lengths_N)).astype("<i8"))
        self._write("document_offsets", (self.sentences + np.cumsum(kept_D)).astype("<i8"))
        self._write("splits", np.asarray(splits_D, dtype="<u1"))
        self._write("document_hashes", np.asarray(hashes_D, dtype="<u8"))
        self.tokens += len(ids_T)
        self.sentences += len(lengths_N)

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def _build(corpus: CorpusOption, tokenizer: Tokenizer, folder: Path, fingerprint: str, words: str | None) -> None:
    writer = _Writer(folder, tokenizer, words)
    try:
        texts: list[str] = []
        documents: list[tuple[str, int, int]] = []
        for document in corpus.read():
            found = sentences(document.text, corpus.language)
            texts += found
            documents.append((document.split, document.content, len(found)))
            if len(texts) >= _BATCH:
                writer.add(texts, documents)
                texts, documents = [], []
        writer.add(texts, documents)
    finally:
        writer.close()
    if writer.tokens == 0:
        raise ValueError(f"corpus {corpus.title} gives no token under this tokenizer")
    tokenizer.save(folder)
    meta = {
        "version": STORE_VERSION,
        "fingerprint": fingerprint,
        "corpus": corpus.title,
        "id_dtype": tokenizer.id_dtype.newbyteorder("<").str,
        "counts": writer.counts,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
