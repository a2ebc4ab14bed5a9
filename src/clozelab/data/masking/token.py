"""Token masking (Devlin et al. 2019): single tokens, chosen uniformly, 80% hidden, 10% exchanged, 10% kept.

Static and dynamic masking (Liu et al. 2019, section 4.1) are one thing: the number that enters the key of the draw. The
epoch gives new masks each time; epoch modulo k gives k copies that come round again.

The number of targets in a row is fixed by how many of its tokens may be masked (BERT's rule), not drawn: max(1,
round(rate x maskable)). So K, the width of the target arrays, is known beforehand and shapes never change.
"""

import dataclasses
import functools
import math

import numpy as np
import numpy.typing as npt

from clozelab import seeds
from clozelab.data.tokenizers import Tokenizer
from clozelab.options import option

IGNORED = -100  # the id of an unused target; torch's cross entropy ignores it by default

Masked = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]


@functools.lru_cache(maxsize=64)
def _target_counts(rate: float, length: int) -> npt.NDArray[np.int64]:
    """[length + 1]: how many targets a row with so many maskable tokens gets; it never falls."""
    maskable = np.arange(length + 1)
    wanted = np.maximum(1, np.rint(rate * maskable)).astype(np.int64)
    return np.asarray(np.minimum(maskable, wanted), dtype=np.int64)


@option("masking", "token")
@dataclasses.dataclass
class TokenMasking:
    """Uniformly chosen single tokens."""

    rate: float = 0.15
    """Share of a row's maskable tokens that become targets."""
    corruption: list[float] = dataclasses.field(default_factory=lambda: [0.8, 0.1, 0.1])
    """Shares of the targets that are hidden by the mask token, exchanged for a random token, kept as they are."""
    copies: int | None = None
    """None: new masks every epoch (dynamic); k: k sets of masks that take turns (static; BERT has 10)."""

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"masking.rate is {self.rate}; give a share above 0, at most 1")
        shares = list(self.corruption)
        if len(shares) != 3 or min(shares) < 0 or not math.isclose(sum(shares), 1, abs_tol=1e-6):
            raise ValueError(f"masking.corruption is {shares}; give three shares (mask, random, keep) that sum to 1")
        if self.copies is not None and self.copies < 1:
            raise ValueError(f"masking.copies is {self.copies}; give 1 or more, or null for new masks every epoch")

    def targets(self, max_length: int) -> int:
        """K: target slots of a row in a format of `max_length` positions."""
        return int(_target_counts(self.rate, max_length)[-1])

    def __call__(
        self,
        ids_BS: npt.NDArray[np.int64],
        maskable_BS: npt.NDArray[np.bool_],
        tokenizer: Tokenizer,
        *,
        seed: int,
        epoch: int,
        example_ids: npt.NDArray[np.int64],
        stream: str = "mask",
    ) -> Masked:
        """Choose targets and corrupt them.

        Returns:
            input_ids [B, S], target_positions [B, K] (rising, then 0 where unused), target_ids [B, K] (-100 where
            unused), all int64. `ids_BS` is left as it is.
        """
        B, S = ids_BS.shape
        counts = _target_counts(self.rate, S)
        K = int(counts[-1])
        key = (epoch if self.copies is None else epoch % self.copies,)
        draws = seeds.bits(seed, stream, key, example_ids, S + K)

        # The K smallest of independent draws are K positions drawn without replacement; a row needs its first few. The
        # position rides in the low bits of its own draw: one sort of plain numbers gives the choice and no ties.
        low = np.uint64((1 << S.bit_length()) - 1)
        order_BS = np.where(maskable_BS, (draws[:, :S] & ~low) | np.arange(S, dtype=np.uint64), ~np.uint64(0))
        order_BS.sort(axis=1)
        count_B1 = counts[np.count_nonzero(maskable_BS, axis=1)][:, None]
        used_BK = np.arange(K) < count_B1
        positions_BK = np.where(used_BK, (order_BS[:, :K] & low).astype(np.int64), S)
        positions_BK.sort(axis=1)
        positions_BK[~used_BK] = 0

        flat_BK = positions_BK + np.arange(B)[:, None] * S
        originals_BK = ids_BS.ravel()[flat_BK]
        # Of a target's own 64 bits, the upper 24 say what happens to it and the lower 40 which token may replace it.
        fate_BK = draws[:, S:]
        kind_BK = (fate_BK >> np.uint64(40)) * 2.0**-24
        what_BK = (fate_BK & np.uint64(2**40 - 1)) * 2.0**-40
        random_BK = tokenizer.ordinary_ids[(what_BK * len(tokenizer.ordinary_ids)).astype(np.int64)]
        mask, random, _ = self.corruption
        new_BK = np.where(kind_BK < mask, tokenizer.mask_id, np.where(kind_BK < mask + random, random_BK, originals_BK))
        input_BS = ids_BS.copy()
        input_BS.ravel()[flat_BK[used_BK]] = new_BK[used_BK]
        return input_BS, positions_BK, np.where(used_BK, originals_BK, IGNORED)
