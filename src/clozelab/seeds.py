"""Named random streams: every draw is a pure function of (seed, stream, key..., index).

No global generator exists anywhere in the data code. A draw depends on *what* is drawn, never on when or by whom, so it
is the same for any number of workers, ranks and resumptions. Whole batches are drawn by array operations: the
generator is a counter-based one (the SplitMix64 finaliser over a Weyl sequence, Steele et al. 2014,
"Fast splittable pseudorandom number generators", OOPSLA), keyed by BLAKE2b of the stream's name.
"""

import hashlib
import math

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
    # x ^= x >> 30; x *= M1; x ^= x >> 27; x *= M2; x ^= x >> 31, with two arrays in all.
    mixed = x >> np.uint64(30)
    mixed ^= x
    mixed *= _MIX1
    shifted = mixed >> np.uint64(27)
    mixed ^= shifted
    mixed *= _MIX2
    np.right_shift(mixed, np.uint64(31), out=shifted)
    mixed ^= shifted
    return mixed


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


def permute(
    seed: int, stream: str, key: tuple[int, ...], n: int, places: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The items at some places of a random order of 0 to n - 1, without making the order.

    A place is split as l b + r, with a b just above n, and l and r take turns in shifting each other by a mixed copy of
    themselves, eight times: a Feistel network over Z_a x Z_b, which is a permutation whatever the mixing is. What falls
    at n or above goes through it again until it does not (both: Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains").

    Args:
        places: int64, any shape, each from 0 to n - 1.

    Returns:
        int64 of that shape; all different where the places are.
    """
    b = np.uint64(max(1, math.isqrt(n - 1) + 1))
    a = np.uint64(-(-n // int(b)))
    keys = [np.uint64(stream_key(seed, stream, *key, turn)) for turn in range(8)]

    def network(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x // b, x % b
        for turn in range(0, 8, 2):
            left = (left + (_mix(right * _GOLDEN + keys[turn]) >> np.uint64(11))) % a
            right = (right + (_mix(left * _GOLDEN + keys[turn + 1]) >> np.uint64(11))) % b
        return left * b + right

    found = network(places.astype(np.uint64).ravel())
    outside = np.flatnonzero(found >= n)
    while len(outside):
        found[outside] = network(found[outside])
        outside = outside[found[outside] >= n]
    return found.astype(np.int64).reshape(places.shape)
