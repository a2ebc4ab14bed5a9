"""A word cache in front of WordPiece: the same ids, several times faster.

BERT's pre-tokenizer parts words at white space and around every punctuation sign, and its normaliser works sign by
sign. So a word's ids do not depend on its neighbours, and English text repeats its words: each distinct word goes
through the `tokenizers` library once, and a line becomes a regular-expression split and a table look-up.

What is not plain goes through the library itself, line by line: lines with a sign outside ASCII or a control sign (the
normaliser may drop or change it), and lines in which an added token such as "[MASK]" stands.
"""

import itertools
import json
import re

import numpy as np
import numpy.typing as npt
import tokenizers

_word = re.compile(r"[0-9A-Za-z]+|[!-/:-@\[-`{-~]|\n")
_control = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_newline = 0  # number of the entry that ends a line

MAX_WORDS = 2_000_000
"""Distinct words after which the table starts afresh (numbers and misspellings never end)."""


class WordCache:
    """Encodes batches of lines as `tokenizer.encode_batch(lines, add_special_tokens=False)` would."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        self._reset()

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> "WordCache | None":
        """A cache for the tokenizer, or None where words are not independent of each other by its definition."""
        definition = json.loads(tokenizer.to_str())
        independent = (
            (definition["model"] or {}).get("type") == "WordPiece"
            and (definition["normalizer"] or {}).get("type") == "BertNormalizer"
            and (definition["normalizer"] or {}).get("clean_text") is True
            and (definition["pre_tokenizer"] or {}).get("type") == "BertPreTokenizer"
            and not any(token["single_word"] for token in definition["added_tokens"])
        )
        return cls(tokenizer) if independent else None

    def _reset(self) -> None:
        self._number: dict[str, int] = {"\n": _newline}
        # Word w has the pieces _pieces[_starts[w] : _starts[w] + _lengths[w]].
        self._pieces = np.zeros(0, dtype=np.uint32)
        self._starts = np.zeros(1, dtype=np.int64)
        self._lengths = np.zeros(1, dtype=np.int64)

    def _learn(self, words: list[str]) -> None:
        lists = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(words, add_special_tokens=False)]
        lengths_W = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
        flat = np.fromiter(itertools.chain.from_iterable(lists), dtype=np.uint32, count=int(lengths_W.sum()))
        starts_W = np.cumsum(lengths_W) - lengths_W + len(self._pieces)
        first = len(self._number)
        self._number.update(zip(words, range(first, first + len(words)), strict=True))
        self._pieces = np.concatenate([self._pieces, flat])
        self._starts = np.concatenate([self._starts, starts_W])
        self._lengths = np.concatenate([self._lengths, lengths_W])

    def _is_plain(self, line: str) -> bool:
        return line.isascii() and not _control.search(line) and not any(token in line for token in self._added)

    def encode_flat(self, lines: list[str]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """(ids [T], lengths [N]): the lines' ids one after another, and how many each line has."""
        text = "\n".join(lines)
        odd: list[int] = []
        if not self._is_plain(text.replace("\n", " ")) or text.count("\n") != len(lines) - 1:
            odd = [n for n, line in enumerate(lines) if "\n" in line or not self._is_plain(line)]
            plain = list(lines)
            for n in odd:
                plain[n] = ""
            text = "\n".join(plain)
        ids_T, lengths_N = self._encode_plain(text)
        if len(lines) == 0:
            return ids_T, lengths_N[:0]
        return self._insert(lines, odd, ids_T, lengths_N) if odd else (ids_T, lengths_N)

    def _encode_plain(self, text: str) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        words = _word.findall(text)
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

    def _insert(
        self, lines: list[str], odd: list[int], ids_T: npt.NDArray[np.uint32], lengths_N: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Put in the ids of the lines that the library must encode itself; they are empty so far."""
        encodings = self._tokenizer.encode_batch_fast([lines[n] for n in odd], add_special_tokens=False)
        ends_N = np.cumsum(lengths_N)
        parts: list[npt.NDArray[np.uint32]] = []
        done = 0
        for n, encoding in zip(odd, encodings, strict=True):
            parts += [ids_T[done : ends_N[n]], np.asarray(encoding.ids, dtype=np.uint32)]
            done = int(ends_N[n])
            lengths_N[n] = len(encoding.ids)
        return np.concatenate([*parts, ids_T[done:]]), lengths_N
