"""The process of one cell: `python -m clozelab.running.child RUN_DIRECTORY [PARENT_PID [RESUME]]`; parent 0 is none.

It ties itself to the process that started it before it imports anything heavy, so that no cell outlives its sweep
unseen, and no rank its cell.
"""

import gc
import os
import signal
import sys

FIRST_RANK = "CLOZELAB_FIRST_RANK"
"""Environment variable by which the first rank of a cell tells the others, which replay its command, its pid."""
# Left over from whoever started the cell, they would make it a rank of somebody else's run.
_RANK_VARIABLES = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def die_with_parent(parent: int) -> None:
    """On Linux, end this process when its parent ends, however that ends; at once if it has ended already."""
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"clozelab: the process {parent} that started this cell is gone")


def _parent(argument: str) -> int:
    """Who started this process: the first rank if it is a further one, else whoever the command names; 0: nobody."""
    if FIRST_RANK in os.environ:
        return int(os.environ[FIRST_RANK])
    for name in _RANK_VARIABLES:
        os.environ.pop(name, None)
    return int(argument)


if __name__ == "__main__":
    # Slurm's notice reaches every process of a job; it is for the supervisor, which then asks the cell to end.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if parent := _parent(sys.argv[2] if len(sys.argv) > 2 else "0"):
        die_with_parent(parent)
    gc.disable()  # as the warm process does
    from clozelab.training.cell import main

    gc.freeze()
    gc.enable()
    sys.exit(main(*sys.argv[1:2], *sys.argv[3:4]))
