"""Tokenizers: text to ids by the `tokenizers` library, with the special tokens under one set of names.

Two families are known, by the special tokens of their vocabularies:

    BERT      [PAD] [UNK] [CLS] [SEP] [MASK]
    RoBERTa   <pad> <unk> <s>   </s>  <mask>

Options (group `tokenizer`): `wordpiece` and `byte_bpe` are trained on the training split only, `file` is read.
Text is encoded sentence by sentence, without special tokens: a format puts those in.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import filelock
import numpy as np
import numpy.typing as npt
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.processors
import tokenizers.trainers

from clozelab.data.corpus import digest, package_version
from clozelab.data.plain import encode_flat
from clozelab.data.segmenter import check_segmenter
from clozelab.data.wordcache import WordCache
from clozelab.data.wordpiece import train_wordpiece, wordpiece
from clozelab.data.words import WordStarts
from clozelab.options import option

# Part of every fingerprint: raise it when the same text and settings give another tokenizer.
TOKENIZER_VERSION = 2

ROLES = ("pad", "unk", "cls", "sep", "mask")
FAMILIES = {
    "BERT": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "RoBERTa": ("<pad>", "<unk>", "<s>", "</s>", "<mask>"),
}


class Tokenizer:
    """A `tokenizers.Tokenizer` whose special tokens have roles.

    Args:
        inner: the tokenizer; padding and truncation are switched off.
        origin: how errors call it, for example its file.

    Raises:
        ValueError: the vocabulary has neither family's special tokens complete; names those it lacks.
    """

    def __init__(self, inner: tokenizers.Tokenizer, origin: str) -> None:
        inner.no_padding()
        inner.no_truncation()
        self.inner = inner
        self.origin = origin
        names = _family(inner, origin)
        self.special_tokens: dict[str, str] = dict(zip(ROLES, names, strict=True))
        inner.add_special_tokens(list(names))
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (_id(inner, name) for name in names)
        if inner.post_processor is None:
            # Not used here; an exported tokenizer.json should add the special tokens as a format does.
            inner.post_processor = tokenizers.processors.BertProcessing(
                (names[3], self.sep_id), (names[2], self.cls_id)
            )
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)
        vocabulary = inner.get_vocab(with_added_tokens=True)
        added = {identifier for identifier, token in inner.get_added_tokens_decoder().items() if token.special}
        unused = {identifier for token, identifier in vocabulary.items() if token.startswith("[unused")}
        self.special_ids: frozenset[int] = frozenset(
            added | unused | {self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id}
        )
        if max(vocabulary.values()) != self.vocab_size - 1:
            raise ValueError(f"{origin}: the ids are not 0 to {self.vocab_size - 1} without gaps")
        is_special_V = np.zeros(self.vocab_size, dtype=bool)
        is_special_V[list(self.special_ids)] = True
        self.is_special_V: npt.NDArray[np.bool_] = is_special_V
        self.ordinary_ids: npt.NDArray[np.int64] = np.flatnonzero(~is_special_V)
        """Ids that text is made of: what a random replacement may be. No special, added or unused token."""
        self.word_starts = WordStarts.of(inner)
        """Where words begin; None where the vocabulary does not tell."""
        self._cache = WordCache.of(inner)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the whole definition (vocabulary, merges, normaliser, special tokens)."""
        return digest(TOKENIZER_VERSION, self.inner.to_str())

    @property
    def id_dtype(self) -> np.dtype:
        """The smallest unsigned type that holds every id."""
        return np.dtype(np.uint16 if self.vocab_size <= 65535 else np.uint32)

    def encode_flat(self, sentences: list[str]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """(ids [T], lengths [N]): the sentences' ids one after another, and how many each sentence has."""
        if self._cache is not None:
            return self._cache.encode_flat(sentences)
        return encode_flat(self.inner, sentences)

    def encode_batch(self, sentences: list[str]) -> list[npt.NDArray[np.int64]]:
        """Ids of each sentence, without special tokens."""
        ids_T, lengths_N = self.encode_flat(sentences)
        return np.split(ids_T.astype(np.int64), np.cumsum(lengths_N)[:-1]) if sentences else []

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, special tokens shown."""
        return str(self.inner.decode([int(i) for i in ids], skip_special_tokens=False))

    def save(self, folder: Path) -> Path:
        """Write `folder`/tokenizer.json in the layout of the `tokenizers` library; returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "tokenizer.json"
        self.inner.save(str(path))
        return path

    def __reduce__(self) -> tuple[Callable[[str, str], "Tokenizer"], tuple[str, str]]:
        return _from_string, (self.inner.to_str(), self.origin)


def _from_string(definition: str, origin: str) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(definition), origin)


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json file.

    Raises:
        ValueError: no such file, not a tokenizer, or special tokens missing.
    """
    if not path.is_file():
        raise ValueError(f"no tokenizer file {path}")
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is not a tokenizer.json: {str(error).splitlines()[0]}") from None
    return Tokenizer(inner, str(path))


def _family(inner: tokenizers.Tokenizer, origin: str) -> tuple[str, ...]:
    missing = {
        family: [name for name in names if inner.token_to_id(name) is None] for family, names in FAMILIES.items()
    }
    family = min(missing, key=lambda family: len(missing[family]))
    if len(missing[family]) == len(ROLES):
        # Neither style at all: a byte-level vocabulary would be RoBERTa's, any other BERT's.
        family = "RoBERTa" if isinstance(inner.model, tokenizers.models.BPE) else "BERT"
    if missing[family]:
        raise ValueError(
            f"{origin}: the vocabulary lacks {', '.join(missing[family])}; a {family}-style vocabulary needs "
            f"{' '.join(FAMILIES[family])}: add them to the file"
        )
    return FAMILIES[family]


def _id(inner: tokenizers.Tokenizer, token: str) -> int:
    identifier = inner.token_to_id(token)
    assert identifier is not None, token
    return int(identifier)


class TokenizerOption:
    """What an option of the group `tokenizer` can do."""

    words: str | None = None

    def fingerprint(self, corpus_fingerprint: str) -> str:
        """Hash that pins the tokenizer without making it."""
        raise NotImplementedError

    def load(self, training_texts: Callable[[], Iterable[str]], corpus_fingerprint: str, cache: Path) -> Tokenizer:
        """The tokenizer; `training_texts` gives the training split's documents and is called only if one is trained."""
        raise NotImplementedError


class _Trained(TokenizerOption):
    """Trained on the training split and kept in `cache`/tokenizers/<fingerprint>/tokenizer.json."""

    vocab_size: int

    def __post_init__(self) -> None:
        if self.vocab_size < 300:
            raise ValueError(f"tokenizer.vocab_size is {self.vocab_size}; give at least 300")

    def _train(self, texts: Callable[[], Iterable[str]]) -> tokenizers.Tokenizer:
        raise NotImplementedError

    def fingerprint(self, corpus_fingerprint: str) -> str:
        settings = sorted((key, value) for key, value in vars(self).items() if (key, value) != ("words", None))
        version = package_version("tokenizers")
        return digest(TOKENIZER_VERSION, type(self).__name__, settings, version, corpus_fingerprint)

    def load(self, training_texts: Callable[[], Iterable[str]], corpus_fingerprint: str, cache: Path) -> Tokenizer:
        folder = cache / "tokenizers" / self.fingerprint(corpus_fingerprint)
        path = folder / "tokenizer.json"
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(folder / "lock"):
                if not path.is_file():
                    inner = self._train(lambda: _not_empty(training_texts()))
                    temporary = folder / f"tokenizer.{os.getpid()}.tmp"
                    Tokenizer(inner, type(self).__name__).inner.save(str(temporary))
                    os.replace(temporary, path)
        return read_tokenizer(path)


def _not_empty(texts: Iterable[str]) -> Iterable[str]:
    count = 0
    for text in texts:
        count += 1
        # Paragraph by paragraph: the library counts words of a text in one go, and small pieces share the work better.
        yield from text.split("\n\n")
    if count == 0:
        raise ValueError(
            "the training split is empty: no document to train a tokenizer on; "
            "lower corpus.validation and corpus.test, or give more documents"
        )


@option("tokenizer", "wordpiece")
@dataclasses.dataclass
class WordPieceOption(_Trained):
    """BERT's tokenizer (Devlin et al. 2019), trained on the training split."""

    vocab_size: int = 8192
    """Entries, special tokens included; a small text may give fewer."""
    lowercase: bool = True
    """Fold case and strip accents, as the uncased BERT models do."""
    words: str | None = None
    """What says where words begin: jieba (Chinese); null: the vocabulary itself ("##" goes on with a word)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_segmenter(self.words)

    def _train(self, texts: Callable[[], Iterable[str]]) -> tokenizers.Tokenizer:
        return wordpiece(train_wordpiece(texts, self.vocab_size, FAMILIES["BERT"], self.lowercase), self.lowercase)


@option("tokenizer", "byte_bpe")
@dataclasses.dataclass
class ByteBpeOption(_Trained):
    """RoBERTa's tokenizer (GPT-2's byte-level pair encoding; Liu et al. 2019), trained on the training split."""

    vocab_size: int = 8192
    """Entries, special tokens and the 256 bytes included."""

    def _train(self, texts: Callable[[], Iterable[str]]) -> tokenizers.Tokenizer:
        inner = _byte_bpe(tokenizers.models.BPE())
        # RoBERTa's order, but for <mask>, which fairseq appends at the end.
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator(texts(), trainer)
        return inner


def _byte_bpe(model: tokenizers.models.BPE) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return inner


@option("tokenizer", "file")
@dataclasses.dataclass
class FileOption(TokenizerOption):
    """A tokenizer from disk: tokenizer.json, vocab.txt (WordPiece), or vocab.json + merges.txt (byte-level BPE)."""

    path: str = ""
    """The file, or a folder that holds one of these sets of files."""
    merges: str | None = None
    """The merges file of a byte-level vocabulary whose two files are not vocab.json and merges.txt of one folder."""
    lowercase: bool | None = None
    """Fold case (vocab.txt only); None: fold unless the vocabulary itself has upper-case letters."""
    words: str | None = None
    """What says where words begin: jieba (Chinese); null: the vocabulary itself."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("tokenizer.path is empty; give a tokenizer.json, a vocab.txt, or a folder that holds one")
        files = self._files()
        check_segmenter(self.words)
        if self.lowercase is not None and not _is_vocab_txt(files):
            raise ValueError(f"tokenizer.lowercase: {files[0]} states its own case folding; leave lowercase out")

    def _files(self) -> list[Path]:
        path = Path(self.path).expanduser()
        if path.is_dir():
            for names in (("tokenizer.json",), ("vocab.txt",), ("vocab.json", "merges.txt")):
                if all((path / name).is_file() for name in names):
                    return [path / name for name in names]
            raise ValueError(f"{path} holds no tokenizer.json, no vocab.txt, and no vocab.json with merges.txt")
        files = [path] if self.merges is None else [path, Path(self.merges).expanduser()]
        for file in files:
            if not file.is_file():
                raise ValueError(f"tokenizer: no file {file}")
        return files

    def fingerprint(self, corpus_fingerprint: str) -> str:
        contents = [file.read_bytes() for file in self._files()]
        words = [] if self.words is None else [self.words]
        return digest(TOKENIZER_VERSION, "file", package_version("tokenizers"), self.lowercase, contents, *words)

    def load(self, training_texts: Callable[[], Iterable[str]], corpus_fingerprint: str, cache: Path) -> Tokenizer:
        files = self._files()
        if len(files) == 2:
            try:
                model = tokenizers.models.BPE.from_file(str(files[0]), str(files[1]))
            except Exception as error:  # the library raises plain Exception
                raise ValueError(f"{files[0]}, {files[1]}: {str(error).splitlines()[0]}") from None
            return Tokenizer(_byte_bpe(model), str(files[0]))
        if _is_vocab_txt(files):
            return self._vocab_txt(files[0])
        return read_tokenizer(files[0])

    def _vocab_txt(self, path: Path) -> Tokenizer:
        try:
            # Not `splitlines`: a vocabulary may hold signs that Unicode calls line breaks too.
            lines = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text (byte {error.start})") from None
        vocabulary = {line.rstrip("\r"): number for number, line in enumerate(lines)}
        if len(vocabulary) != len(lines):
            raise ValueError(f"{path}: {len(lines) - len(vocabulary)} entries stand there twice")
        lowercase = self.lowercase
        if lowercase is None:
            lowercase = not any("A" <= word[:1] <= "Z" for word in vocabulary)
        unk = next((name for name in ("[UNK]", "<unk>") if name in vocabulary), "[UNK]")
        return Tokenizer(wordpiece(tokenizers.models.WordPiece(vocabulary, unk_token=unk), lowercase), str(path))


def _is_vocab_txt(files: list[Path]) -> bool:
    if len(files) != 1:
        return False
    try:
        json.loads(files[0].read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError):
        return True
    return False
