"""Named random streams: every draw is a pure function of (seed, stream, key..., index).

No global generator exists anywhere in the data code. A draw depends on *what* is drawn, never on when or by whom, so it
is the same for any number of workers, ranks and resumptions. Whole batches are drawn by array operations: the
generator is a counter-based one (the SplitMix64 finaliser over a Weyl sequence, Steele et al. 2014,
"Fast splittable pseudorandom number generators", OOPSLA), keyed by BLAKE2b of the stream's name.
"""

import hashlib

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def stream_key(seed: int, stream: str, *key: int) -> int:
    """64-bit key of the stream `stream` of `seed`, narrowed by `key` (for example an epoch)."""
    text = "\x1f".join([str(seed), stream, *map(str, key)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def rng(seed: int, stream: str, *key: int) -> np.random.Generator:
    """A NumPy generator of its own for (seed, stream, key...), for draws that are not per example."""
    return np.random.Generator(np.random.Philox(key=stream_key(seed, stream, *key)))


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def bits(
    seed: int, stream: str, key: tuple[int, ...], indices: npt.NDArray[np.int64], n: int
) -> npt.NDArray[np.uint64]:
    """[B, n] uint64: n independent words for each of the B example indices."""
    base = np.uint64(stream_key(seed, stream, *key))
    row_B1 = _mix(_mix(indices.astype(np.uint64) * _GOLDEN + base) ^ base)[:, None]
    column_1n = (np.arange(1, n + 1, dtype=np.uint64) * _GOLDEN)[None, :]
    return _mix(row_B1 + column_1n)


def uniform(
    seed: int, stream: str, key: tuple[int, ...], indices: npt.NDArray[np.int64], n: int
) -> npt.NDArray[np.float64]:
    """[B, n] float64 in [0, 1): n independent uniform draws for each of the B example indices."""
    return (bits(seed, stream, key, indices, n) >> np.uint64(11)).astype(np.float64) * 2.0**-53
