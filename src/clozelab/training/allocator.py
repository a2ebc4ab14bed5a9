"""Keep big blocks on the heap.

glibc gives every block above a threshold fresh pages from the kernel and returns them when freed. A training step
frees and asks for the same activations again and again, so the kernel zeroes the same gigabytes every step; kept on
the heap they cost nothing the second time.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_heap() -> bool:
    """Tell the C library to keep freed memory, before large blocks are made; True where it is glibc and agreed."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  (raises AttributeError where the C library is another one)
        return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, -1))
    except (OSError, AttributeError):
        return False
