"""Phrases and entities of a list (ERNIE, Sun et al. 2019, section 3.2): what stands in the list is hidden as a whole.

The list is a text file, one phrase a line, cut into pieces as the corpus is. Where several phrases begin at one place
the longest counts, and of overlapping ones the first. What belongs to no phrase is hidden word by word.
"""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt

from clozelab.data.masking.selection import Bools, Ints, Selection, numbered
from clozelab.data.tokenizers import Tokenizer
from clozelab.options import option

LONGEST = 16
"""Pieces that a phrase may have; longer ones are left out."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@option("masking/selection", "phrases")
@dataclasses.dataclass
class PhraseSelection(Selection):
    """Phrases of a list, and whole words."""

    needs_draws = False
    path: str = ""
    """The list: a UTF-8 text file with one phrase a line."""

    def check(self, tokenizer: Tokenizer) -> None:
        super().check(tokenizer)
        if not self.path:
            raise ValueError("masking.selection.path is empty; give a text file with one phrase a line")
        if not Path(self.path).expanduser().is_file():
            raise ValueError(f"masking.selection.path: no file {self.path}")
        if not _phrases(self.path, tokenizer):
            raise ValueError(f"masking.selection.path: {self.path} holds no phrase of 2 to {LONGEST} pieces")

    def units(
        self,
        ids_BS: Ints,
        maskable_BS: Bools,
        starts_word_BS: Bools,
        tokenizer: Tokenizer,
        draws_BS: npt.NDArray[np.uint64],
    ) -> Ints:
        B, S = ids_BS.shape
        begins_BS, inside_BS = np.zeros((B, S), dtype=bool), np.zeros((B, S), dtype=bool)
        length_BS = np.zeros((B, S), dtype=np.int64)
        hash_BS = np.zeros((B, S), dtype=np.uint64)
        text_BS = np.ones((B, S), dtype=bool)
        ends_word_BS = np.ones((B, S), dtype=bool)
        ends_word_BS[:, :-1] = starts_word_BS[:, 1:] | ~maskable_BS[:, 1:]
        for n in range(1, min(LONGEST, S) + 1):
            # The hash of the n pieces from each place on grows by one piece a turn.
            wide = S - n + 1
            hash_BS[:, :wide] = _grown(hash_BS[:, :wide], ids_BS[:, n - 1 :].astype(np.uint64), n)
            text_BS[:, :wide] &= maskable_BS[:, n - 1 :]
            known = _phrases(self.path, tokenizer).get(n)
            if known is not None:
                found_BW = np.isin(hash_BS[:, :wide], known) & text_BS[:, :wide]
                found_BW &= starts_word_BS[:, :wide] & ends_word_BS[:, n - 1 :]
                length_BS[:, :wide] = np.where(found_BW, n, length_BS[:, :wide])
        reach_B = np.zeros(B, dtype=np.int64)
        for place in range(S):
            free_B = (length_BS[:, place] > 0) & (reach_B <= place)
            begins_BS[:, place] = free_B
            reach_B = np.where(free_B, place + length_BS[:, place], reach_B)
            inside_BS[:, place] = reach_B > place
        # A unit begins at a phrase, behind one, and at every word outside.
        behind_BS = np.zeros_like(inside_BS)
        behind_BS[:, 1:] = inside_BS[:, :-1] & ~inside_BS[:, 1:]
        return numbered(begins_BS | behind_BS | (starts_word_BS & ~inside_BS), maskable_BS)


def _grown(hashed: npt.NDArray[np.uint64], piece: npt.NDArray[np.uint64] | np.uint64, n: int) -> npt.NDArray[np.uint64]:
    """The hash of n pieces, from that of all but the last of them."""
    return (hashed ^ piece) * _FACTOR + np.uint64(n)


def _phrases(path: str, tokenizer: Tokenizer) -> dict[int, npt.NDArray[np.uint64]]:
    """Number of pieces -> hashes of the phrases that have so many."""
    file = Path(path).expanduser()
    return _read(str(file), file.stat().st_mtime_ns, tokenizer.fingerprint, tokenizer)


@functools.lru_cache(maxsize=8)
def _read(path: str, changed: int, fingerprint: str, tokenizer: Tokenizer) -> dict[int, npt.NDArray[np.uint64]]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"masking.selection.path: {path} is not UTF-8 text (byte {error.start}); convert it to UTF-8"
        ) from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # A byte-level vocabulary has other pieces for a phrase behind a space than at the beginning of a sentence.
    found: dict[int, set[int]] = {}
    for ids in tokenizer.encode_batch([*lines, *(f" {line}" for line in lines)]):
        if 2 <= len(ids) <= LONGEST:
            hashed = np.zeros(1, dtype=np.uint64)
            for n, piece in enumerate(ids.tolist(), start=1):
                hashed = _grown(hashed, np.uint64(piece), n)
            found.setdefault(len(ids), set()).add(int(hashed[0]))
    return {n: np.asarray(sorted(hashes), dtype=np.uint64) for n, hashes in found.items()}
