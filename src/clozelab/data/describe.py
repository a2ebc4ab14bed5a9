"""What a corpus is made of, for people: counts per split, duplicates, and what looks wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clozelab import seeds
from clozelab.data.corpus import SPLITS, CorpusOption
from clozelab.data.store import Store, open_store
from clozelab.data.tokenizers import TokenizerOption

_CHUNK = 200_000  # sentences hashed at a time


def describe(corpus: CorpusOption, tokenizer: TokenizerOption, cache: Path | None = None) -> dict[str, Any]:
    """Counts of a corpus under a tokenizer; builds its store if need be.

    Returns:
        corpus, fingerprint, path, hit (the store was there already), vocabulary (entries); splits: split -> documents,
        sentences, words, tokens, duplicate_documents, duplicate_sentences (whose text, or ids, were met before in any
        split); warnings: sentences for a person.
    """
    store = open_store(corpus, tokenizer, cache)
    repeated_N = _repeated_sentences(store)
    splits: dict[str, dict[str, int]] = {}
    for split in SPLITS:
        counts = dict(store.counts[split])
        counts["duplicate_documents"] = counts.pop("duplicates")
        counts["duplicate_sentences"] = sum(
            int(repeated_N[store.document_offsets[d] : store.document_offsets[d + 1]].sum())
            for d in store.documents_of(split)
        )
        splits[split] = counts
    return {
        "corpus": store.corpus,
        "fingerprint": store.fingerprint,
        "path": str(store.path),
        "hit": store.hit,
        "vocabulary": store.tokenizer.vocab_size,
        "splits": splits,
        "warnings": _warnings(store, splits),
    }


def _warnings(store: Store, splits: dict[str, dict[str, int]]) -> list[str]:
    documents = len(store.splits)
    sentences_D = np.diff(store.document_offsets)
    found = []
    if documents == 1:
        found.append(
            "the corpus is one document: nothing can be held out, and next sentence prediction has no other document; "
            "part it (for plain text: corpus.document_separator)"
        )
    if documents > 1 and int(sentences_D.max()) == 1:
        found.append(
            "every document has one sentence: there are no neighbours to pair; if each line is a sentence, put blank "
            "lines between documents only"
        )
    for split in ("train", "validation"):
        if splits[split]["documents"] == 0:
            found.append(f"the {split} split is empty; change corpus.validation, or give more documents")
    duplicates = sum(counts["duplicate_documents"] for counts in splits.values())
    if duplicates:
        found.append(f"{duplicates} of {documents} documents repeat another's text")
    return found


def _repeated_sentences(store: Store) -> npt.NDArray[np.bool_]:
    """[N]: whether a sentence's ids were met before in the corpus, by 64-bit hash."""
    offsets = store.sentence_offsets
    hashes_N = np.empty(len(offsets) - 1, dtype=np.uint64)
    for first in range(0, len(hashes_N), _CHUNK):
        here = offsets[first : first + _CHUNK + 1]
        lengths = np.diff(here)
        place_T = np.arange(int(lengths.sum())) - np.repeat(here[:-1] - here[0], lengths)
        # A sentence's hash is the sum of a random number for each (token, place).
        word_T = store.ids[here[0] : here[-1]].astype(np.int64) * 65_536 + place_T
        token_T = seeds.bits(0, "sentence-hash", (), word_T, 1)[:, 0]
        hashes_N[first : first + _CHUNK] = np.add.reduceat(token_T, here[:-1] - here[0])
    repeated_N = np.ones(len(hashes_N), dtype=bool)
    repeated_N[np.unique(hashes_N, return_index=True)[1]] = False
    return repeated_N
