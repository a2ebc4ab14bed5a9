"""The process of one cell: `python -m clozelab.running.child RUN_DIRECTORY [PARENT_PID]`.

It ties itself to the process that started it before it imports anything heavy, so that no cell outlives its sweep
unseen.
"""

import os
import signal
import sys


def die_with_parent(parent: int) -> None:
    """On Linux, end this process when its parent ends, however that ends; at once if it has ended already."""
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    # A rank's parent is the first rank, which holds the sweep's pid for it.
    if "LOCAL_RANK" not in os.environ and os.getppid() != parent:
        sys.exit(f"clozelab: the process {parent} that started this cell is gone")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        die_with_parent(int(sys.argv[2]))
    from clozelab.training.cell import main

    sys.exit(main(sys.argv[1]))
