"""A corpus of local files: plain text, JSON lines or parquet, each also as .gz, .xz, .zst or .bz2."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

from clozelab.data.corpora import files, grouping
from clozelab.data.corpus import CorpusOption, Raw, blank, digest
from clozelab.options import option

_SEPARATORS = {"file": grouping.whole, "blank_line": grouping.by_blank_line, "heading": grouping.by_heading}
_PARAGRAPHS = ("blank_line", "line")


def joiner(paragraphs: str) -> str:
    """What joins the lines of a document under the setting `corpus.paragraphs`.

    Raises:
        ValueError: neither blank_line nor line.
    """
    if paragraphs not in _PARAGRAPHS:
        raise ValueError(f"corpus.paragraphs is {paragraphs}; give one of {', '.join(_PARAGRAPHS)}")
    return "\n\n" if paragraphs == "line" else "\n"


@functools.lru_cache(maxsize=4096)
def _file_hash(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def file_hash(path: Path) -> str:
    """Hash of a file's bytes; read once while size and time of change stay the same."""
    stat = path.stat()
    return _file_hash(path, stat.st_size, stat.st_mtime_ns)


@option("corpus", "text")
@dataclasses.dataclass
class Text(CorpusOption):
    """Local files. In JSON lines and parquet every row is a document."""

    paths: list[str] = dataclasses.field(default_factory=list)
    """Files and glob patterns (`**` goes down into folders)."""
    text_column: str = "text"
    """Field of JSON lines or column of parquet that holds the text: a string, or a list of paragraphs."""
    document_separator: str = "file"
    """What parts documents in plain text: file, blank_line, or heading (WikiText's ` = Title = `)."""
    paragraphs: str = "blank_line"
    """What parts paragraphs: blank_line, or line (every line is a paragraph)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.document_separator not in _SEPARATORS:
            raise ValueError(
                f"corpus.document_separator is {self.document_separator}; give one of {', '.join(_SEPARATORS)}"
            )
        joiner(self.paragraphs)

    @property
    def title(self) -> str:
        return f"text ({', '.join(self.paths)})"

    def _files(self) -> list[Path]:
        return files.expand(list(self.paths), "corpus.paths")

    def source(self) -> Iterator[Raw]:
        paths = self._files()
        position = files.Position(paths)
        for path in paths:
            count = 0
            for number, text in enumerate(self._texts(path, position)):
                if not blank(text):
                    count += 1
                    yield Raw(f"{path.name}#{number}", text, position.share)
            if count == 0:
                raise ValueError(f"{path} holds nothing but white space; leave it out or put text in")

    def _texts(self, path: Path, position: files.Position) -> Iterator[str]:
        kind = files.kind(path)
        join = joiner(self.paragraphs)
        if kind == "text":
            for document in _SEPARATORS[self.document_separator](files.lines(path, position)):
                text = join.join(document)
                document.clear()  # as lines a text takes twice its room or more, and a document may be a whole file
                yield text
            return
        rows = files.json_texts if kind == "jsonl" else files.parquet_texts
        for text in rows(path, self.text_column, position):
            yield text.replace("\n", join)

    def source_fingerprint(self) -> str:
        contents = [(path.name, file_hash(path)) for path in self._files()]
        return digest("text", 1, contents, self.text_column, self.document_separator, self.paragraphs)
