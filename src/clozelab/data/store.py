"""The store: a corpus as ids on disk, built once, mapped into memory by every run, worker and rank.

`<cache>/<data fingerprint>/` holds

    ids.bin                 uint16 | uint32 [T]   the sentences' ids, one after another, without special tokens
    sentence_offsets.bin    int64 [N + 1]         sentence n is ids[sentence_offsets[n] : sentence_offsets[n + 1]]
    document_offsets.bin    int64 [D + 1]         document d has the sentences document_offsets[d : d + 2]
    splits.bin              uint8 [D]             0 train, 1 validation, 2 test
    document_hashes.bin     uint64 [D]            equal where two documents have equal texts
    words.bin               bool [T]              which tokens begin a word; only where a segmenter said so
    tokenizer.json, meta.json

It is written in a stream (never the whole corpus in memory; `data.building`) into a folder beside its place, under a
file lock, and moved into place by one rename: whoever finds the folder finds it complete. A build that was interrupted
leaves `.<data fingerprint>.unfinished`, and the next one goes on with it.
"""

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import numpy.typing as npt

from clozelab.data.building import INTERRUPTIONS, STORE_VERSION, build
from clozelab.data.corpus import SPLITS, CorpusOption, digest
from clozelab.data.progress import Progress
from clozelab.data.tokenizers import Tokenizer, TokenizerOption, read_tokenizer
from clozelab.data.workers import processes

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

    def word_starts(
        self, ids_BS: npt.NDArray[np.int64], source_BS: npt.NDArray[np.int64] | None
    ) -> npt.NDArray[np.bool_]:
        """[B, S]: True where a word begins; of what is not text (source -1) the values mean nothing.

        `source` is needed only where a segmenter said where words begin (`words`).
        """
        if self.words is not None:
            assert source_BS is not None
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
    """The store of a corpus under a tokenizer; built if it is not there yet, under a lock.

    A large corpus is encoded by as many processes as there are CPUs, or $CLOZELAB_PROCESSES. A build that was killed or
    interrupted goes on where it was when the same store is opened again.

    Raises:
        ValueError: the corpus or the tokenizer cannot be read, the training split is empty, the cache has no room,
            CLOZELAB_PROCESSES is no number, or a process was killed.
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
            processes()  # a wrong setting shows before a tokenizer is trained
            made = tokenizer.load(lambda: _training_texts(corpus), source, cache)
            beside = cache / f".{fingerprint}.unfinished"
            for left in cache.glob(f".{fingerprint}.*"):  # as older versions named it; the lock is ours
                if left != beside:
                    shutil.rmtree(left, ignore_errors=True)
            try:
                build(corpus, made, beside, fingerprint, tokenizer.words)
                os.replace(beside, folder)
            except INTERRUPTIONS:
                raise
            except Exception:
                shutil.rmtree(beside, ignore_errors=True)
                raise
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


def _training_texts(corpus: CorpusOption) -> Iterator[str]:
    """The training split, for a tokenizer to be trained on."""
    with Progress(f"tokenizer for {corpus.title}") as progress:
        for document in corpus.read():
            progress.add(1, 0, len(document.text), document.done)
            if document.split == "train":
                yield document.text


@contextmanager
def _room(cache: Path) -> Iterator[None]:
    """Say in one line what is wrong with the cache folder, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(f"no room in the cache folder {cache}: free some, or set CLOZELAB_CACHE") from None
        if error.errno in (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EPERM, errno.ENOENT):
            reason = os.strerror(error.errno)
            raise ValueError(f"cannot write to the cache folder {cache} ({reason}): set CLOZELAB_CACHE") from None
        raise
