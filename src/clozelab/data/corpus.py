"""A corpus: documents in order, each a run of sentences, parted into train, validation and test by what they say.

Rules that every source shares:

* A document's text is canonical: paragraphs parted by one blank line, any other white space collapsed to one space, no
  byte-order mark, no half of a surrogate pair. Documents without a word are left out.
* A document's split follows from a hash of its canonical text alone, so equal texts land on the same side wherever they
  come from, and neither order nor the number of documents moves any of them.
* `train_documents` keeps the training documents with the smallest hashes: subsets are nested, and validation and test
  stay as they are.
* Sentences are cut by `sentencex` (Wikimedia's rule-based segmenter) inside each paragraph.
"""

import dataclasses
import functools
import hashlib
import heapq
import importlib.metadata
import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import sentencex

if TYPE_CHECKING:
    import datasets

# Part of every fingerprint: raise it when documents, sentences or splits come out differently for the same bytes.
DATA_VERSION = 1

SPLITS = ("train", "validation", "test")

_surrogate = re.compile("[\ud800-\udfff]")
_blank_lines = re.compile(r"\n[^\S\n]*(?:\n[^\S\n]*)+")


class Document(NamedTuple):
    """One document as the rest of the program sees it."""

    id: str
    text: str
    split: str
    content: int
    """64-bit hash of the canonical text; equal texts have equal numbers."""
    done: float | None = None
    """Share of the source (0 to 1) that was read when this document was; None where the source has no known end."""


class Raw(NamedTuple):
    """One document as its source has it."""

    id: str
    text: str
    done: float | None
    """As in `Document`."""


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a document in canonical form, one at a time: a text of any size is never held a second time."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff")
    if _surrogate.search(text):  # half a sign, as a broken JSON escape leaves it
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    begin = 0
    for border in _blank_lines.finditer(text):
        if paragraph := _one_line(text[begin : border.start()]):
            yield paragraph
        begin = border.end()
    if paragraph := _one_line(text[begin:]):
        yield paragraph


def _one_line(text: str) -> str:
    # The only printable white space is the space: most paragraphs are seen to be in order without being taken apart.
    if text.isprintable() and "  " not in text:
        return text.strip(" ")
    return " ".join(text.split())


def canonical(text: str) -> str:
    """Paragraphs parted by one blank line, every other run of white space one space; "" when there is no word."""
    return "\n\n".join(paragraphs(text))


def blank(text: str) -> bool:
    """Whether the canonical text is empty, without making it."""
    text = text.lstrip("\ufeff")
    return not text or text.isspace()


class ContentHash:
    """64-bit BLAKE2b of a canonical text, fed a paragraph at a time."""

    def __init__(self) -> None:
        self._state = hashlib.blake2b(digest_size=8)
        self.bytes = 0
        """bytes of the canonical text so far, in UTF-8"""

    def add(self, paragraph: str) -> None:
        """The next paragraph."""
        data = paragraph.encode("utf-8", "surrogatepass")
        if self.bytes:
            self._state.update(b"\n\n")
            self.bytes += 2
        self._state.update(data)
        self.bytes += len(data)

    @property
    def value(self) -> int:
        """The hash of the paragraphs so far."""
        return int.from_bytes(self._state.digest(), "little")


def content_hash(text: str) -> int:
    """64-bit BLAKE2b of a canonical text."""
    made = ContentHash()
    made.add(text)
    return made.value


def split_of_hash(content: int, validation: float, test: float) -> str:
    """The split of a document by its content hash: "train", "validation" or "test"."""
    share = content / 2.0**64
    if share < validation:
        return "validation"
    return "test" if share < validation + test else "train"


def split_of(text: str, validation: float, test: float) -> str:
    """The split of a document, by the hash of its canonical text: "train", "validation" or "test"."""
    return split_of_hash(content_hash(canonical(text)), validation, test)


def sentences_of(paragraph: str, language: str) -> list[str]:
    """The sentences of a canonical paragraph in order, stripped, none empty."""
    found = (sentence.strip() for sentence in sentencex.segment(language, paragraph))
    return [sentence for sentence in found if sentence]


def sentences(text: str, language: str) -> list[str]:
    """The sentences of a document in order, stripped, none empty; a sentence never crosses a paragraph border."""
    return [sentence for paragraph in text.split("\n\n") for sentence in sentences_of(paragraph, language)]


@functools.cache
def package_version(name: str) -> str:
    """Version of an installed package whose behaviour the data depend on."""
    return importlib.metadata.version(name)


def digest(*parts: object) -> str:
    """128-bit hexadecimal hash of a few values, told apart by their order and by `repr`."""
    return hashlib.blake2b("\x1f".join(map(repr, parts)).encode(), digest_size=16).hexdigest()


@dataclasses.dataclass
class CorpusOption:
    """What every corpus can be told; a source adds where its text is, `source` and `source_fingerprint`."""

    language: str = "en"
    """ISO 639 code for the sentence segmenter."""
    validation: float = 0.1
    """Share of the documents held out for validation, by hash."""
    test: float = 0.0
    """Share of the documents held out for a final test, by hash."""
    train_documents: int | None = None
    """Keep only so many training documents (those of smallest hash); None keeps all."""

    def __post_init__(self) -> None:
        for key in ("validation", "test"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"corpus.{key} is {getattr(self, key)}; give a share from 0 to below 1")
        if self.validation + self.test >= 1:
            raise ValueError("corpus.validation + corpus.test leave nothing to train on; their sum must be below 1")
        if self.train_documents is not None and self.train_documents < 1:
            raise ValueError(f"corpus.train_documents is {self.train_documents}; give 1 or more, or null for all")

    @property
    def title(self) -> str:
        """How messages call this corpus."""
        return type(self).__name__

    def source(self) -> Iterator[Raw]:
        """Every document in order, as the source has it, with the share of the source read so far where that is known.

        Raises:
            ValueError: the source is missing, empty or broken; one line that names it and the way out.
        """
        raise NotImplementedError

    def source_fingerprint(self) -> str:
        """Hash of the source's bytes (or of what pins them) and of the settings that change `source`."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Hash of everything that changes documents, sentences or splits. Reads bytes at most; builds nothing."""
        settings = (self.language, self.validation, self.test, self.train_documents)
        return digest(DATA_VERSION, package_version("sentencex"), self.source_fingerprint(), settings)

    def _written(self) -> Iterator[Raw]:
        """The source's documents that have a word in them."""
        count = 0
        for raw in self.source():
            if not blank(raw.text):
                count += 1
                yield raw
        if count == 0:
            raise ValueError(f"corpus {self.title} holds no document with a word in it")

    def _hashed(self, raw: Raw) -> Document:
        text = canonical(raw.text)
        content = content_hash(text)
        return Document(raw.id, text, split_of_hash(content, self.validation, self.test), content, raw.done)

    def _kept(self) -> bytearray:
        """Per document with a word in it, whether `train_documents` keeps it: one byte a document."""
        assert self.train_documents is not None
        kept = bytearray()

        def training() -> Iterator[tuple[int, int]]:
            for number, raw in enumerate(self._written()):
                document = self._hashed(raw)
                kept.append(document.split != "train")
                if document.split == "train":
                    yield document.content, number

        chosen = heapq.nsmallest(self.train_documents, training())
        if len(chosen) < self.train_documents:
            raise ValueError(
                f"corpus.train_documents is {self.train_documents}, but corpus {self.title} has only {len(chosen)} "
                "training documents; give fewer, or null for all"
            )
        for _, number in chosen:
            kept[number] = True
        return kept

    def raw(self) -> Iterator[Raw]:
        """Every document in order, not yet canonical, streamed: read through once (twice under `train_documents`)."""
        if self.train_documents is None:
            return self._written()
        return itertools.compress(self._written(), self._kept())

    def read(self) -> Iterator[Document]:
        """Every document in order, canonical and with its split, streamed as `raw` does."""
        return map(self._hashed, self.raw())

    def texts(self, split: str) -> Iterator[str]:
        """The documents' texts of one split, streamed."""
        return (document.text for document in self.read() if document.split == split)

    def documents(self) -> "datasets.Dataset":
        """All documents as a `datasets.Dataset` with the columns id, text and split, on disk in the cache folder."""
        import datasets

        from clozelab.data.store import cache_dir

        def rows() -> Iterator[dict[str, str]]:
            for document in self.read():
                yield {"id": document.id, "text": document.text, "split": document.split}

        features = datasets.Features({key: datasets.Value("string") for key in ("id", "text", "split")})
        cache = str(cache_dir() / "documents")
        made = datasets.Dataset.from_generator(rows, features=features, cache_dir=cache, fingerprint=self.fingerprint())
        assert isinstance(made, datasets.Dataset)
        return made
