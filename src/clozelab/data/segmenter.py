"""Words of a language that writes none: where they begin, told by a segmenter from the text itself.

A Chinese vocabulary has a piece for every character, and says nothing of words. `tokenizer.words=jieba` cuts each
sentence into words before its ids are written, and the store keeps a mark for every piece that begins one.
"""

import logging
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import tokenizers

SEGMENTERS = ("jieba",)


def check_segmenter(name: str | None) -> None:
    """Refuse a segmenter that is not known or not installed.

    Raises:
        ValueError: names tokenizer.words and the way out.
    """
    if name is None:
        return
    if name not in SEGMENTERS:
        raise ValueError(f"tokenizer.words is {name!r}; give {', '.join(SEGMENTERS)}, or null")
    try:
        import jieba  # noqa: F401
    except ImportError:
        raise ValueError("tokenizer.words=jieba needs jieba: pip install 'clozelab[zh]'") from None


def _words(text: str) -> Iterator[tuple[int, int]]:
    """(first character, the one after the last) of every word."""
    import jieba

    jieba.setLogLevel(logging.WARNING)
    for _, begin, end in jieba.tokenize(text):
        yield begin, end


def marked(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> npt.NDArray[np.bool_]:
    """[T]: of the pieces of the texts, one text after another, those that begin a word."""
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    found: list[npt.NDArray[np.bool_]] = [np.zeros(0, dtype=bool)]
    for text, encoding in zip(texts, encodings, strict=True):
        begins = np.zeros(len(text) + 1, dtype=bool)
        begins[[begin for begin, _ in _words(text)]] = True
        at = np.fromiter((begin for begin, _ in encoding.offsets), dtype=np.int64, count=len(encoding.offsets))
        found.append(begins[at])
    return np.concatenate(found)
