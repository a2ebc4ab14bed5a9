"""Opening text files of any of the usual kinds, with errors that name the file and the way out."""

import bz2
import glob
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

_COMPRESSED = (".gz", ".xz", ".zst", ".bz2")
# What would be read as text, and is none.
_ARCHIVES = (".zip", ".tar", ".tgz", ".txz", ".7z", ".rar")
_DOCUMENTS = (".pdf", ".docx", ".odt", ".epub", ".html", ".htm", ".xml")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def kind(path: Path) -> str:
    """ "parquet", "jsonl" or "text", by the file's name without a compression suffix.

    Raises:
        ValueError: an archive, or a document with a markup of its own.
    """
    name = path.name.lower()
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    if name.endswith(_ARCHIVES):
        raise ValueError(f"{path} is an archive; unpack it, and give the files that were in it")
    if name.endswith(_DOCUMENTS):
        raise ValueError(f"{path} is no plain text; take the text out of it first")
    if name.endswith(".parquet"):
        return "parquet"
    return "jsonl" if name.endswith((".jsonl", ".ndjson", ".json")) else "text"


def expand(patterns: list[str], key: str) -> list[Path]:
    """The files of a list of paths and glob patterns: in the order given, the matches of a pattern sorted.

    Raises:
        ValueError: nothing given, a path that is no file, a pattern without a match.
    """
    if not patterns:
        raise ValueError(f"{key} is empty; give at least one file or pattern, for example {key}=[books/*.txt]")
    found: list[Path] = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            raise ValueError(f"{key}: {path} is a folder; give its files, for example {path}/*.txt")
        if path.is_file():
            found.append(path)
        elif glob.has_magic(pattern):
            matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
            files = [match for match in matches if match.is_file()]
            if not files:
                raise ValueError(f"{key}: no file matches {pattern} (looked from {Path.cwd()})")
            found += files
        else:
            raise ValueError(f"{key}: no file {path} (looked from {Path.cwd()})")
    return found


class Position:
    """How far a row of files has been read: in bytes on disk, compressed or not.

    Args:
        paths: the files in the order in which they are read.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._total = sum(path.stat().st_size for path in paths)
        self._before = 0
        self._file: IO[bytes] | None = None

    @property
    def share(self) -> float:
        """Share of all bytes read so far, 0 to 1; a little ahead of the text given out, by what is buffered."""
        here = self._file.tell() if self._file is not None else 0
        return min(1.0, (self._before + here) / max(1, self._total))

    @contextmanager
    def within(self, file: IO[bytes]) -> Iterator[None]:
        """The file is the one that is being read."""
        self._file = file
        try:
            yield
        finally:
            self._file = None
            self._before += os.fstat(file.fileno()).st_size


class _Unpacked(io.RawIOBase):
    """The bytes of a .zst file of any number of frames. The library's own reader takes a file that was cut off in the
    middle of a frame for one that ends there."""

    def __init__(self, packed: IO[bytes]) -> None:
        import zstandard

        self._packed, self._library = packed, zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._waiting, self._rest = memoryview(b""), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._waiting:
            data = self._rest or self._packed.read(1 << 17)
            self._rest = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            if self._frame is None:
                self._frame = self._library.decompressobj()
            self._waiting = memoryview(self._frame.decompress(data))
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._waiting))
        buffer[:size] = self._waiting[:size]
        self._waiting = self._waiting[size:]
        return size


@contextmanager
def reading(path: Path, position: Position | None = None) -> Iterator[IO[bytes]]:
    """The file's bytes, unpacked if it is compressed; `position`, if given, follows the reading.

    Raises:
        ValueError: an empty file, or broken compressed data.
    """
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty (0 bytes); leave it out or put text in")
    suffix = path.suffix.lower()
    try:
        with path.open("rb") as raw, position.within(raw) if position is not None else nullcontext():
            stream: Any
            if suffix == ".gz":
                stream = gzip.GzipFile(fileobj=raw)
            elif suffix == ".xz":
                stream = lzma.open(raw)  # noqa: SIM115 (closes with raw)
            elif suffix == ".bz2":
                stream = bz2.BZ2File(raw)
            elif suffix == ".zst":
                stream = _Unpacked(raw)
            else:
                stream = raw
            yield stream
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        raise ValueError(f"{path} is no whole {suffix} file: {error}") from None
    except Exception as error:
        # Of a broken .bz2 file: an OSError that has no number, as those of the disk have.
        broken = suffix == ".bz2" and isinstance(error, OSError) and error.errno is None
        if broken or type(error).__name__ == "ZstdError":
            raise ValueError(f"{path} is no whole {suffix} file: {error}") from None
        raise


def lines(path: Path, position: Position | None = None) -> Iterator[str]:
    """The file's lines as UTF-8 text without their ends; a byte-order mark is skipped.

    Raises:
        ValueError: the bytes are no UTF-8; names the line.
    """
    number = 0
    with reading(path, position) as stream:
        buffered = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream)  # type: ignore[type-var, arg-type]
        for number, line in enumerate(buffered, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                encoding = "UTF-16" if number == 1 and line.startswith(_UTF16) else "LATIN1"
                raise ValueError(
                    f"{path}, line {number}: the bytes are not UTF-8; convert the file, for example with "
                    f"iconv -f {encoding} -t UTF-8"
                ) from None
            yield text.rstrip("\r\n")


def json_texts(path: Path, column: str, position: Position | None = None) -> Iterator[str]:
    """The texts of a JSON-lines file: the value of `column`, a string or a list of paragraphs.

    Raises:
        ValueError: a line that is no JSON object, or has no such text; names the line.
    """
    for number, line in enumerate(lines(path, position), start=1):
        if not line.strip():
            continue
        if number == 1 and line.lstrip().startswith("["):
            raise ValueError(f"{path} is a JSON array; wanted is one object a line, as jq -c '.[]' makes of it")
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # of JSON, of a number too long, of brackets too deep
            said = getattr(error, "msg", str(error))
            raise ValueError(f"{path}, line {number}: not a JSON value ({said}); wanted is one object a line") from None
        yield text_of(row, column, f"{path}, line {number}")


def parquet_texts(path: Path, column: str, position: Position | None = None) -> Iterator[str]:
    """The texts of a parquet file, some rows at a time.

    Raises:
        ValueError: no parquet file, or no such column; names those it has.
    """
    import pyarrow
    import pyarrow.parquet

    with reading(path, position) as stream:
        seekable: Any = stream if path.suffix.lower() == ".parquet" else io.BytesIO(stream.read())
        try:
            file = pyarrow.parquet.ParquetFile(seekable)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path} is no parquet file: {str(error).splitlines()[0]}") from None
        if column not in file.schema_arrow.names:
            raise ValueError(f"{path} has no column {column}; it has {', '.join(file.schema_arrow.names)}")
        number = 0
        batches = file.iter_batches(batch_size=256, columns=[column])
        while True:
            try:
                batch = next(batches, None)
            except (pyarrow.ArrowException, OSError) as error:
                if getattr(error, "errno", None):
                    raise  # the disk's, not the file's
                raise ValueError(f"{path} is no whole parquet file: {str(error).splitlines()[0]}") from None
            if batch is None:
                return
            for value in batch.column(0).to_pylist():
                number += 1
                yield text_of({column: value}, column, f"{path}, row {number}")


def text_of(row: Any, column: str, where: str) -> str:
    """The text in a row: a string, or paragraphs in a list.

    Raises:
        ValueError: none of these.
    """
    if not isinstance(row, dict) or column not in row:
        has = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where}: no field {column}; it has {has}")
    value = row[column]
    if isinstance(value, list) and all(isinstance(paragraph, str) for paragraph in value):
        return "\n\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"{where}: {column} is {type(value).__name__}; a string or a list of paragraphs is wanted")
    return value
