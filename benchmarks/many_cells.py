"""What the pool costs: the wall time of many small cells over their own time divided among the slots.

    python benchmarks/many_cells.py [--cells 100] [--slots 2] [--steps 200] [--cold 6]

A cell's own time runs from the fork of the warm process to the end of the forked one, and is taken by the warm process;
so it holds everything that the cell does (reading, building the model, training, measuring, writing), and nothing of
the pool (the imports of the warm process, starting, noticing an end, taking the next). Every cell must have been
forked, or there is no result. `trained and measured` is what of it the cell logged as training and yardsticks. Prints
the load of the machine before and after, and ends with one JSON line.
"""

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from clozelab.running.compose import compose_run, composer, prepare_data
from clozelab.running.directories import freeze
from clozelab.running.job import Job, Outcome
from clozelab.running.pool import Silent, run_jobs
from clozelab.running.warm import WarmProcess, WarmServer

CELL = [
    *("corpus.train_documents=4", "tokenizer.vocab_size=1000", "format.max_length=48", "model=bert_tiny"),
    *("model.hidden=32", "model.layers=1", "model.ffn=64", "model.position.length=48", "batch_size=8"),
    *("budget=steps", "trainer.precision=fp32", "trainer.threads=1", "tracker=none"),
    *("evaluation.heldout_mlm.examples=64", "evaluation.sentence_pairs.examples=64"),
    "evaluation.sentence_pairs.probe_examples=64",
]
_measured = re.compile(r" \(([\d.]+) s\): ")


class Memory(Silent):
    """Resident bytes of the warm process whenever a cell has ended."""

    def __init__(self) -> None:
        self.servers: set[WarmServer] = set()
        self.rows: list[int] = []

    def end(self, outcome: Outcome) -> None:
        """Look."""
        self.rows.append(max((resident(server.pid) for server in self.servers), default=0))


def resident(pid: int) -> int:
    """Bytes of a process in memory; 0 when it has ended, or where there is no /proc."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def make(root: Path, config: dict[str, Any], cells: int) -> list[Job]:
    """Cells that differ in their seed."""
    jobs = [Job(f"seed {seed}", root / f"s{seed}") for seed in range(cells)]
    for seed, job in enumerate(jobs):
        freeze(job.directory, config | {"seed": seed, "runs_dir": str(root)})
    return jobs


def trained_and_measured(directory: Path) -> float:
    """Seconds of training, and of every yardstick to a tenth, as the cell logged them."""
    record = json.loads((directory / "record.json").read_text())
    logged = _measured.findall((directory / "train.log").read_text())
    return float(record["budgets"]["seconds"]) + sum(map(float, logged))


def pool(jobs: list[Job], slots: int, warm: bool, memory: Memory) -> tuple[float, list[WarmProcess]]:
    """(wall seconds, the processes that were forked)."""
    processes: list[WarmProcess] = []
    start = WarmServer.start

    def noted(server: WarmServer, directory: Path, environment: Mapping[str, str], stop: Any) -> WarmProcess:
        process = start(server, directory, environment, stop)
        memory.servers.add(server)
        processes.append(process)
        return process

    begin = time.perf_counter()
    with patch.object(WarmServer, "start", noted):
        outcomes = run_jobs(jobs, slots, warm=warm, follow=memory)
    wall = time.perf_counter() - begin
    failed = [outcome for outcome in outcomes if outcome.failed]
    if failed or len(outcomes) != len(jobs):
        raise SystemExit(f"{len(failed)} of {len(jobs)} cells failed: {failed[0].reason if failed else 'not run'}")
    return wall, processes


def main() -> None:
    """Run the cells warm, then some cold, and print what the pool adds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=100, help="cells that are forked")
    parser.add_argument("--slots", type=int, default=2, help="cells at a time")
    parser.add_argument("--cold", type=int, default=6, help="cells that are started as fresh interpreters")
    parser.add_argument("--steps", type=int, default=200, help="optimiser steps of a cell")
    arguments = parser.parse_args()
    with composer():
        config = compose_run([*CELL, f"budget.steps={arguments.steps}"])
    prepare_data([config])
    with tempfile.TemporaryDirectory() as folder:
        jobs = make(Path(folder) / "warm", config, arguments.cells)
        memory, load = Memory(), os.getloadavg()[0]
        wall, processes = pool(jobs, arguments.slots, True, memory)
        own = [process.seconds for process in processes if process.seconds is not None]
        load_after = os.getloadavg()[0]
        inner = [trained_and_measured(job.directory) for job in jobs]
        cold = make(Path(folder) / "cold", config, arguments.cold)
        cold_wall, _ = pool(cold, arguments.slots, False, Memory())
    if len(own) != len(jobs):
        raise SystemExit(f"only {len(own)} of {len(jobs)} cells were forked")
    share = sum(own) / arguments.slots
    settled = memory.rows[min(10, len(memory.rows) - 1)]
    print(f"{len(own)} cells, {arguments.slots} slots: {wall:.1f} s; their own time over the slots {share:.1f} s")
    print(f"wall / own time: {wall / share:.3f} (goal: 1.15); load {load:.1f} before, {load_after:.1f} after")
    print(f"a cell: own time {statistics.median(own):.2f} s, trained and measured {statistics.median(inner):.2f} s")
    print(
        f"the warm process: {settled / 2**20:.1f} MiB after 10 cells, {memory.rows[-1] / 2**20:.1f} MiB after the last"
    )
    if cold:
        print(f"cold: {cold_wall / len(cold):.2f} s a cell, warm: {wall / len(own):.2f} s a cell, all told")
    numbers = {
        "ratios": {"wall_over_own": wall / share},
        "load": [load, load_after],
        "wall_seconds": wall,
        "own_seconds": statistics.median(own),
        "trained_and_measured_seconds": statistics.median(inner),
        "cold_seconds_a_cell": cold_wall / len(cold) if cold else None,
        "warm_growth_mib": (memory.rows[-1] - settled) / 2**20,
    }
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
