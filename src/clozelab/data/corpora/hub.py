"""A corpus from the Hugging Face hub, or any other set that `datasets.load_dataset` opens."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clozelab.data.corpora import files
from clozelab.data.corpora.grouping import grouping
from clozelab.data.corpora.text import file_hash, joiner
from clozelab.data.corpus import CorpusOption, Raw, digest
from clozelab.options import option


@dataclasses.dataclass
class _Rows:
    """How far a set has been read."""

    read: int = 0
    total: int | None = None

    @property
    def share(self) -> float | None:
        return min(1.0, self.read / self.total) if self.total else None


def _number_of_rows(loaded: Any) -> int | None:
    """The rows of a set: a loaded one has a length, of a streamed one the hub may know it."""
    if hasattr(loaded, "__len__"):
        return len(loaded)
    splits = getattr(getattr(loaded, "info", None), "splits", None) or {}
    split = splits.get(str(getattr(loaded, "split", None)))
    return getattr(split, "num_examples", None) or None


_BUILDERS = {"parquet": "parquet", "jsonl": "json", "text": "text"}


@option("corpus", "hub")
@dataclasses.dataclass
class Hub(CorpusOption):
    """Any set of `datasets.load_dataset`. Presets: wikipedia, bookcorpus, wikitext, c4."""

    path: str = ""
    """Name of the set on the hub."""
    name: str | None = None
    """Its configuration, for example 20231101.en (`name` of load_dataset)."""
    split: str = "train"
    """Which of the set's own splits is read; training and validation are parted by this program afterwards."""
    revision: str | None = None
    """Commit or tag of the set. Without one, a run's identity cannot see that the set has changed."""
    data_files: list[str] | None = None
    """Local files (glob patterns too) with the same layout, read instead of the hub; or files within the set."""
    text_column: str = "text"
    """Column that holds the text."""
    rows: str = "row"
    """How rows become documents: row, wikitext (a row ` = Title = ` begins one), consecutive:N (N rows are one)."""
    paragraphs: str = "line"
    """What parts paragraphs inside a row: line, or blank_line."""
    streaming: bool = False
    """Read over the network as needed instead of downloading the whole set first."""
    max_documents: int | None = None
    """Stop after so many documents; None reads all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise ValueError("corpus.path is empty; give the name of a set on the hub, for example Salesforce/wikitext")
        if self.max_documents is not None and self.max_documents < 1:
            raise ValueError(f"corpus.max_documents is {self.max_documents}; give 1 or more, or null for all")
        grouping(self.rows, "corpus.rows")
        joiner(self.paragraphs)

    @property
    def title(self) -> str:
        return self.path if self.name is None else f"{self.path} {self.name}"

    def _local(self) -> list[Path]:
        """The local files among `data_files`; either all of them are local or none."""
        given = self.data_files or []
        if not any(Path(name).expanduser().is_absolute() or Path(name).exists() for name in given):
            return []
        return files.expand(list(given), "corpus.data_files")

    def _load(self) -> Any:
        import datasets

        local = self._local()
        kinds = {files.kind(path) for path in local}
        if len(kinds) > 1:
            raise ValueError(f"corpus.data_files mixes {', '.join(sorted(kinds))}; give files of one kind")
        for path in local:
            with files.reading(path):
                pass  # an empty file gives an opaque error inside datasets
        try:
            if local:
                names = [str(path) for path in local]
                builder = _BUILDERS[kinds.pop()]
                return datasets.load_dataset(builder, data_files=names, split="train", streaming=self.streaming)
            return datasets.load_dataset(
                self.path,
                self.name,
                split=self.split,
                revision=self.revision,
                data_files=self.data_files,
                streaming=self.streaming,
            )
        except Exception as error:  # datasets, huggingface_hub, fsspec and httpx all raise their own
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"corpus {self.title}: {reason}; check corpus.path, corpus.name, corpus.split and the network, or give "
                "local files with the same columns by corpus.data_files=[...]"
            ) from error

    def _rows(self, position: "_Rows") -> Iterator[str]:
        loaded = self._load()
        columns = loaded.column_names
        if columns is not None and self.text_column not in columns:
            raise ValueError(f"corpus {self.title} has no column {self.text_column}; it has {', '.join(columns)}")
        if columns is not None:
            loaded = loaded.select_columns([self.text_column])
        position.total = _number_of_rows(loaded)
        for number, row in enumerate(loaded):
            position.read = number + 1
            yield files.text_of(row, self.text_column, f"corpus {self.title}, row {number}")

    def source(self) -> Iterator[Raw]:
        join = joiner(self.paragraphs)
        position = _Rows()
        documents = grouping(self.rows, "corpus.rows")(self._rows(position))
        for number, rows in enumerate(itertools.islice(documents, self.max_documents)):
            share = position.share
            if self.max_documents is not None:
                share = max(share or 0.0, (number + 1) / self.max_documents)
            yield Raw(str(number), "\n\n".join(row.replace("\n", join) for row in rows), share)

    def source_fingerprint(self) -> str:
        contents = [(path.name, file_hash(path)) for path in self._local()]
        origin = contents or (self.path, self.name, self.split, self.revision, self.data_files)
        return digest("hub", 1, origin, self.text_column, self.rows, self.paragraphs, self.max_documents)
