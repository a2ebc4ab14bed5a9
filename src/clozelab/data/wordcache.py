"""A word cache in front of WordPiece: the same ids, several times faster again.

In plain text a word's ids do not depend on its neighbours (`data.plain`), and a text repeats its words: each distinct
word goes through the whole of the `tokenizers` library once, and a line becomes a regular-expression split and a table
look-up. As every word is the library's to normalise, more text is plain here than printable ASCII: Latin letters with
accents, and the quotation marks, dashes and dots of typography. Which of them may pass is asked of the library itself,
sign by sign.
"""

import re

import numpy as np
import tokenizers

from clozelab.data.plain import Flat, PlainWordPiece, encode_flat

_ASCII_WORD, _ASCII_APART = "0-9A-Za-z", r"!-/:-@\[-`{-~"
_LETTERS = [chr(code) for code in range(0xC0, 0x250)]
_MARKS = list("\u00a1\u00a7\u00ab\u00b6\u00b7\u00bb\u00bf\u2010\u2013\u2014\u2018\u2019\u201c\u201d\u2020\u2022\u2026")
_SPACES = list("\u00a0\u2009")
_newline = 0  # number of the entry that ends a line

MAX_WORDS = 500_000
"""Distinct words after which the table starts afresh (numbers and misspellings never end)."""


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
        self._number: dict[str, int] = {"\n": _newline}
        # Word w has the pieces _pieces[_starts[w] : _starts[w] + _lengths[w]].
        self._pieces = np.zeros(0, dtype=np.uint32)
        self._starts = np.zeros(1, dtype=np.int64)
        self._lengths = np.zeros(1, dtype=np.int64)

    def _learn(self, words: list[str]) -> None:
        ids_T, lengths_W = encode_flat(self._tokenizer, words)
        starts_W = np.cumsum(lengths_W) - lengths_W + len(self._pieces)
        first = len(self._number)
        self._number.update(zip(words, range(first, first + len(words)), strict=True))
        self._pieces = np.concatenate([self._pieces, ids_T])
        self._starts = np.concatenate([self._starts, starts_W])
        self._lengths = np.concatenate([self._lengths, lengths_W])

    def _encode_plain(self, text: str) -> Flat:
        words = self._word.findall(text.lower() if self._lowercase else text)
        try:
            numbers_W = np.fromiter(map(self._number.__getitem__, words), dtype=np.int64, count=len(words))
        except KeyError:
            if len(self._number) > MAX_WORDS:
                self._reset()
            self._learn(sorted(set(words) - self._number.keys()))
            numbers_W = np.fromiter(map(self._number.__getitem__, words), dtype=np.int64, count=len(words))
        lengths_W = self._lengths[numbers_W]
        ends_W = np.cumsum(lengths_W)
        # Piece k of word w sits at starts[w] + k: repeat each word's start, shifted by where the word begins here.
        shift_W = self._starts[numbers_W] - (ends_W - lengths_W)
        total = int(ends_W[-1]) if len(ends_W) else 0
        ids_T = self._pieces[np.repeat(shift_W, lengths_W) + np.arange(total)]
        line_ends = np.concatenate([ends_W[numbers_W == _newline], [total]])
        return ids_T, np.diff(line_ends, prepend=0)
