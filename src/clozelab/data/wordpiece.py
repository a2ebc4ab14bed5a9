"""WordPiece as BERT has it, and a training of it that repeats itself.

`tokenizers.trainers.WordPieceTrainer` alone does not: it numbers the continuing pieces ("##e") in the order of a hash
table, which is another one in every process, and breaks ties between merges by these numbers, so that two trainings on
the same text give different vocabularies. Here the pieces of one sign are found first and numbered in sorted order; all
that follows is then fixed by counts.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.normalizers
import tokenizers.pre_tokenizers
import tokenizers.trainers

ALPHABET = 1000
"""Distinct signs that get entries, most frequent first; words with any other become [UNK] (as the library does it)."""
_DISTINCT = 1 << 20  # runs of signs held in memory at a time


def wordpiece(model: tokenizers.models.WordPiece, lowercase: bool) -> tokenizers.Tokenizer:
    """BERT's normaliser, pre-tokenizer and decoder around a WordPiece model."""
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    inner.decoder = tokenizers.decoders.WordPiece()
    return inner


def train_wordpiece(
    texts: Callable[[], Iterable[str]], vocab_size: int, specials: tuple[str, ...], lowercase: bool
) -> tokenizers.models.WordPiece:
    """A WordPiece model of `vocab_size` entries (fewer on small texts): specials, pieces of one sign, merged pieces.

    Args:
        texts: gives the training texts from the start; called twice.

    Raises:
        ValueError: the signs alone need more entries than `vocab_size`.
    """
    inner = wordpiece(tokenizers.models.WordPiece(unk_token="[UNK]"), lowercase)
    alphabet, continuing = _signs(texts(), inner)
    pieces = sorted(alphabet) + sorted(f"##{sign}" for sign in alphabet if sign in continuing)
    if len(specials) + len(pieces) > vocab_size:
        raise ValueError(
            f"tokenizer.vocab_size is {vocab_size}, but the signs of the training text alone need "
            f"{len(specials) + len(pieces)} entries; give more"
        )
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        # As special tokens the pieces keep their numbers; in the model made of the result they are ordinary entries.
        special_tokens=[*specials, *pieces],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    inner.train_from_iterator(texts(), trainer)
    return tokenizers.models.WordPiece(inner.get_vocab(), unk_token="[UNK]")


def _signs(texts: Iterable[str], inner: tokenizers.Tokenizer) -> tuple[list[str], set[str]]:
    """(the most frequent signs of the normalised texts, the signs met inside words after their first sign)."""
    all_counts = np.zeros(0x110000, dtype=np.int64)
    inside = np.zeros(0x110000, dtype=bool)
    parts = np.full(0x110000, -1, dtype=np.int8)  # 1: stands alone or is white space; 0: part of words; -1: not met yet
    for chunks in _distinct(texts):
        # White space always ends a word, so each distinct run of other signs is normalised once.
        normal = [inner.normalizer.normalize_str(chunk) for chunk in chunks]
        text = "\n".join(normal) + "\n"
        codes_T = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.int64)
        times_T = np.repeat(list(chunks.values()), [len(chunk) + 1 for chunk in normal])
        counts = np.bincount(codes_T, weights=times_T).astype(np.int64)
        all_counts[: len(counts)] += counts
        for code in np.flatnonzero(counts).tolist():
            if parts[code] < 0:
                parts[code] = len(inner.pre_tokenizer.pre_tokenize_str(f"a{chr(code)}a")) > 1
        apart_T = parts[codes_T].astype(bool)
        inside[codes_T[1:][~apart_T[1:] & ~apart_T[:-1]]] = True
    order = np.argsort(-all_counts, kind="stable")  # equal counts in order of code points
    met = (chr(code) for code in order.tolist() if all_counts[code])
    alphabet = list(itertools.islice((sign for sign in met if not sign.isspace()), ALPHABET))
    return alphabet, {sign for sign in alphabet if inside[ord(sign)]}


def _distinct(texts: Iterable[str]) -> Iterator[Counter[str]]:
    """How often each run of signs without white space stands in the texts; in parts, to be added up."""
    chunks: Counter[str] = Counter()
    for text in texts:
        chunks.update(text.split())
        if len(chunks) > _DISTINCT:
            yield chunks
            chunks = Counter()
    if chunks:
        yield chunks
