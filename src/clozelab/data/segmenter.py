"""Words of a language that writes none: where they begin, told by a segmenter from the text itself.

A Chinese vocabulary has a piece for every character, and says nothing of words. `tokenizer.words=jieba` cuts each
sentence into words before its ids are written, and the store keeps a mark for every piece that begins one.
"""

import itertools
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


def _word_lengths(texts: list[str]) -> Iterator[list[int]]:
    """Per text, the number of signs of each of its words."""
    import jieba

    jieba.setLogLevel(logging.WARNING)
    for text in texts:
        yield [len(word) for word in jieba.cut(text)]


def encode_marked(
    tokenizer: tokenizers.Tokenizer, texts: list[str]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """(ids [T], marks [T], lengths [N]): the texts' pieces in a row, those that begin a word, and pieces a text."""
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    ids: list[list[int]] = [encoding.ids for encoding in encodings]
    marks: list[npt.NDArray[np.bool_]] = [np.zeros(0, dtype=bool)]
    for text, encoding, lengths in zip(texts, encodings, _word_lengths(texts), strict=True):
        begins = np.zeros(len(text) + 1, dtype=bool)
        begins[[0, *itertools.accumulate(lengths[:-1])]] = True
        at = np.fromiter((begin for begin, _ in encoding.offsets), dtype=np.int64, count=len(encoding.offsets))
        marks.append(begins[at])
    lengths_N = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    ids_T = np.fromiter(itertools.chain.from_iterable(ids), dtype=np.uint32, count=int(lengths_N.sum()))
    return ids_T, np.concatenate(marks), lengths_N
