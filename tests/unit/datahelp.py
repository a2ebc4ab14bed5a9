"""Small made-up corpora for the data tests."""

import os
from pathlib import Path

import numpy as np
import pytest

from clozelab.data.corpora.text import Text
from clozelab.data.store import Store, open_store
from clozelab.data.tokenizers import WordPieceOption

SHARED = Path(os.environ.get("CLOZELAB_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))

WORDS = (
    "river",
    "mountain",
    "senate",
    "tariff",
    "harvest",
    "railway",
    "treaty",
    "village",
    "winter",
    "engine",
    "music",
)


def shared(*parts: str) -> Path:
    """A file of the shared test data, or a skip that says which one is missing."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs {path} (set CLOZELAB_DATA)")
    return path


def document(rng: np.random.Generator, sentences: int) -> str:
    """English-looking text of so many sentences in paragraphs of four."""
    made = []
    for _ in range(sentences):
        words = rng.choice(WORDS, size=int(rng.integers(3, 25)))
        made.append(" ".join(words).capitalize() + f" {rng.integers(100)}.")
    return "\n\n".join(" ".join(made[i : i + 4]) for i in range(0, sentences, 4))


def small_corpus(folder: Path, documents: int = 30, sentences: int = 40, **settings: object) -> Text:
    """A corpus of `documents` files."""
    rng = np.random.default_rng(7)
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(documents):
        (folder / f"{n:03}.txt").write_text(document(rng, sentences), encoding="utf-8")
    return Text(paths=[str(folder / "*.txt")], **{"validation": 0.2, **settings})  # type: ignore[arg-type]


def small_store(folder: Path, **settings: object) -> Store:
    """The store of a small corpus with a small vocabulary."""
    return open_store(small_corpus(folder / "text", **settings), WordPieceOption(vocab_size=400), folder / "cache")  # type: ignore[arg-type]
