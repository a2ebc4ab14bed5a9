"""A word cache in front of WordPiece: the same ids, several times faster again.

In plain text a word's ids do not depend on its neighbours (`data.plain`), and a text repeats its words: each distinct
word goes through the whole of the `tokenizers` library once, each distinct run of signs between two spaces through a
regular expression once, and a line becomes a split and a table look-up. As every word is the library's to normalise,
more text is plain here than printable ASCII: Latin letters with accents, and the quotation marks, dashes and dots of
typography. Which of them may pass is asked of the library itself, sign by sign.
"""

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import tokenizers

from clozelab.data.plain import Flat, PlainWordPiece, encode_flat

_ASCII_WORD, _ASCII_APART = "0-9A-Za-z", r"!-/:-@\[-`{-~"
_LETTERS = [chr(code) for code in range(0xC0, 0x250)]
_MARKS = list("\u00a1\u00a7\u00ab\u00b6\u00b7\u00bb\u00bf\u2010\u2013\u2014\u2018\u2019\u201c\u201d\u2020\u2022\u2026")
_SPACES = list("\u00a0\u2009")
_newline = 0  # number of the entry that ends a line

MAX_WORDS = 1_000_000
"""Distinct words and runs after which the table starts afresh (numbers and misspellings never end)."""


class WordCache(PlainWordPiece):
    """A `PlainWordPiece` that remembers the pieces of every word it met."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        super().__init__(tokenizer)
        inside, apart, spaces = ("".join(signs) for signs in self._plain_signs())
        self._word = re.compile(f"[{_ASCII_WORD}{inside}]+|[{_ASCII_APART}{apart}]|\n")
        self._not_plain = re.compile(f"[^ -~\t\n{inside}{apart}{spaces}]")
        self._reset()

    def _plain_signs(self) -> tuple[list[str], list[str], list[str]]:
        """Signs beyond ASCII that the library treats one by one: parts of words, words of their own, white space."""

        def parts(text: str) -> list[str]:
            normal = self._tokenizer.normalizer.normalize_str(text)
            return [part for part, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(normal)]

        def folded(sign: str) -> str:
            return sign.lower() if self._lowercase else sign

        # What Python folds to another sign must be the same word to the library.
        letters = [sign for sign in _LETTERS if len(parts(f"a{sign}b")) == 1 and folded(sign) in _LETTERS]
        letters = [sign for sign in letters if parts(f"a{folded(sign)}b") == parts(f"a{sign}b")]
        letters = [sign for sign in letters if folded(sign) in letters]
        marks = [sign for sign in _MARKS if parts(f"a{sign}b") == ["a", sign, "b"]]
        return letters, marks, [sign for sign in _SPACES if parts(f"a{sign}b") == ["a", "b"]]

    def _is_plain(self, line: str) -> bool:
        return not self._not_plain.search(line) and not any(token in line for token in self._added)

    def _reset(self) -> None:
        self._words = _Pieces()
        self._chunks = _Pieces()

    def _encode_plain(self, text: str) -> Flat:
        chunks = (text.lower() if self._lowercase else text).replace("\n", " \n ").split(" ")
        ids_T, ends_W, numbers_W = self._chunks.look_up(chunks, self._of_chunks)
        total = len(ids_T)
        line_ends = np.concatenate([ends_W[numbers_W == _newline], [total]])
        return ids_T, np.diff(line_ends, prepend=0)

    def _of_chunks(self, chunks: list[str]) -> Flat:
        """The pieces of runs of signs without a space: those of their words, one after another."""
        if len(self._chunks) + len(self._words) > MAX_WORDS:
            self._reset()
        words = self._word.findall("\n".join(chunks))
        ids_T, ends_W, numbers_W = self._words.look_up(words, lambda new: encode_flat(self._tokenizer, new))
        return ids_T, np.diff(np.concatenate([ends_W[numbers_W == _newline], [len(ids_T)]]), prepend=0)


class _Pieces:
    """Strings and the ids of each; string w has the ids _ids[_starts[w] : _starts[w] + _lengths[w]]."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {"\n": _newline}
        self._ids = np.zeros(0, dtype=np.uint32)
        self._starts = np.zeros(1, dtype=np.int64)
        self._lengths = np.zeros(1, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._number)

    def look_up(
        self, strings: list[str], learn: Callable[[list[str]], Flat]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(ids [T] of the strings one after another; where each ends [W]; its number [W]).

        `learn` gives (ids, lengths) of strings that are met for the first time.
        """
        try:
            numbers_W = self._numbers(strings)
        except KeyError:
            new = sorted(set(strings) - self._number.keys())
            self._add(new, *learn(new))
            numbers_W = self._numbers(strings)
        lengths_W = self._lengths[numbers_W]
        ends_W = np.cumsum(lengths_W)
        # Id k of string w sits at starts[w] + k: repeat each string's start, shifted by where the string begins here.
        shift_W = self._starts[numbers_W] - (ends_W - lengths_W)
        total = int(ends_W[-1]) if len(ends_W) else 0
        return self._ids[np.repeat(shift_W, lengths_W) + np.arange(total)], ends_W, numbers_W

    def _numbers(self, strings: list[str]) -> npt.NDArray[np.int64]:
        return np.fromiter(map(self._number.__getitem__, strings), dtype=np.int64, count=len(strings))

    def _add(self, strings: list[str], ids_T: npt.NDArray[np.uint32], lengths_W: npt.NDArray[np.int64]) -> None:
        starts_W = np.cumsum(lengths_W) - lengths_W + len(self._ids)
        first = len(self._number)
        self._number.update(zip(strings, range(first, first + len(strings)), strict=True))
        self._ids = np.concatenate([self._ids, ids_T])
        self._starts = np.concatenate([self._starts, starts_W])
        self._lengths = np.concatenate([self._lengths, lengths_W])
