"""Where words begin, told from the ids of a sequence.

WordPiece says it piece by piece: what continues a word begins with "##". Byte-level BPE marks the space before a word,
and its pre-tokenizer also parts letters, digits and other signs from each other, as GPT-2's pattern does: a token
begins a word where it has a space before it, or where its first sign is of another kind than the last sign before it.
"""

import dataclasses
import functools
import json

import numpy as np
import numpy.typing as npt
import tokenizers
import tokenizers.pre_tokenizers

_LETTER, _DIGIT, _OTHER = 0, 1, 2


def _kind(sign: str) -> int:
    if sign.isalpha():
        return _LETTER
    return _DIGIT if sign.isnumeric() else _OTHER


@dataclasses.dataclass(frozen=True)
class WordStarts:
    """Tables over the vocabulary."""

    always_V: npt.NDArray[np.bool_]
    """a word begins with this token wherever it stands"""
    first_V: npt.NDArray[np.int8]
    """kind of a token's first sign"""
    last_V: npt.NDArray[np.int8]
    """kind of its last sign"""

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> "WordStarts | None":
        """The tables of a tokenizer, or None where its pieces do not tell."""
        model = json.loads(tokenizer.to_str())["model"]
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        always_V, kinds_2V = np.ones(size, dtype=bool), np.zeros((2, size), dtype=np.int8)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        if model["type"] == "WordPiece":
            for token, identifier in vocabulary.items():
                always_V[identifier] = not token.startswith(model["continuing_subword_prefix"])
        elif model["type"] == "BPE" and isinstance(tokenizer.pre_tokenizer, tokenizers.pre_tokenizers.ByteLevel):
            added = tokenizer.get_added_tokens_decoder()
            for token, identifier in vocabulary.items():
                text = token if identifier in added else _text(token)
                always_V[identifier] = identifier in added or text[:1].isspace()
                if text.strip():
                    kinds_2V[0, identifier], kinds_2V[1, identifier] = _kind(text.strip()[0]), _kind(text[-1])
        else:
            return None
        return cls(always_V, kinds_2V[0], kinds_2V[1])

    @functools.cached_property
    def _kinds(self) -> bool:
        """Whether the kinds of signs tell anything: WordPiece has none."""
        return bool(self.first_V.any() or self.last_V.any())

    def __call__(self, ids_BS: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """[B, S]: True where a word begins."""
        starts_BS: npt.NDArray[np.bool_] = self.always_V.take(ids_BS)
        starts_BS[:, 0] = True
        if self._kinds:
            starts_BS[:, 1:] |= self.first_V[ids_BS[:, 1:]] != self.last_V[ids_BS[:, :-1]]
        return starts_BS


def _bytes_of_signs() -> dict[str, int]:
    """GPT-2's alphabet: the sign that stands for each byte in a byte-level vocabulary."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _bytes_of_signs()


def _text(token: str) -> str:
    # A piece of a sign of several bytes is not text by itself; as a letter it goes on with the word.
    return bytes(_BYTES[sign] for sign in token).decode("utf-8", "replace").replace("\ufffd", "x")
