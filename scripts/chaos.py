"""Kill a sweep at random, again and again, and see that it ends as if nothing had happened.

    python scripts/chaos.py [--minutes 5] [--seed 0] [--slots 2] [--steps 400] [--keep DIR]

A claim of 12 small cells (3 arms x 4 seeds) runs undisturbed once. Then it runs again elsewhere, while cells, warm
processes and the whole sweep are killed (SIGKILL or SIGTERM) at random moments for so many minutes; whenever the sweep
has ended with cells missing it is started again. When the time is up the kills stop, and it is started until it is
done. The records of both must be equal: metrics, budgets but seconds, and the hashes of the scores. Exit code 0 if they
are, 1 if not. The kills follow from the seed; when they strike, the machine decides. Only processes that descend from
the sweep are killed. Linux.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

SMALL = [
    *("corpus.train_documents=4", "tokenizer.vocab_size=1000", "format.max_length=48", "model=bert_tiny"),
    *("model.hidden=32", "model.layers=1", "model.ffn=64", "model.position.length=48", "batch_size=8"),
    *("budget=steps", "trainer.precision=fp32", "trainer.threads=1", "trainer.log_every=4", "tracker=none"),
    *("trainer.checkpoint_every=7", "evaluation.heldout_mlm.examples=64", "evaluation.sentence_pairs.examples=64"),
    "evaluation.sentence_pairs.probe_examples=64",
]
CELLS = 12
ATTEMPTS = 20
"""Starts after the kills have stopped; one should do."""


def claim(steps: int) -> dict[str, Any]:
    """The claim, as its yaml would say."""
    rates = {"low": "1e-4", "middle": "1e-3", "high": "5e-3"}
    return {
        "id": "chaos",
        "title": "Three learning rates",
        "says": "Nothing; it is run to be killed.",
        "sources": [{"paper": "none", "arxiv": "0000.00000", "year": 2026, "where": "a test"}],
        "arms": {arm: {"overrides": [f"optimizer.lr={rate}"]} for arm, rate in rates.items()},
        "control": "low",
        "varies": ["optimizer.lr"],
        "matched": {"steps": 0.0},
        "predictions": [
            {
                "id": "learns",
                "says": "The higher rate has the lower loss.",
                "metric": "heldout_mlm.loss",
                "relation": "high < low",
                "basis": "arithmetic",
            }
        ],
        "seeds": [0, 1, 2, 3],
        "scales": {
            "smoke": {
                "overrides": [*SMALL, f"budget.steps={steps}"],
                "seeds": 4,
                "says": "seconds",
                "expected_time": "seconds",
            }
        },
    }


def start(place: Path, runs: str, slots: int) -> subprocess.Popen[bytes]:
    """`clozelab run` as a process of its own."""
    command = [sys.executable, "-m", "clozelab.cli", "run", "chaos", "--scale", "smoke"]
    with (place / f"{runs}.log").open("ab") as log:
        return subprocess.Popen(
            [*command, "--slots", str(slots), "--runs-dir", runs],
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def descendants(pid: int) -> list[tuple[int, str]]:
    """(pid, what it is) of every process below one: warm, cell or other."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    warm, cells, others = list[int](), list[int](), list[int]()
    for child in [one for one, parent in parents.items() if parent == pid]:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace")
            kind = (
                warm if "clozelab.running.warm" in command else cells if "clozelab.running.child" in command else others
            )
            kind.append(child)
    cells += [one for one, parent in parents.items() if parent in warm]
    return [(one, "warm") for one in warm] + [(one, "cell") for one in cells] + [(one, "other") for one in others]


def strike(sweep: subprocess.Popen[bytes], chance: random.Random) -> str:
    """Kill one thing; says what."""
    aim = chance.choices(["cell", "warm", "sweep"], [6, 2, 3])[0]
    number = chance.choice([signal.SIGKILL, signal.SIGTERM])
    below = sorted(one for one, kind in descendants(sweep.pid) if kind == aim)
    target = sweep.pid if aim == "sweep" else chance.choice(below) if below else None
    if target is None:
        return f"no {aim}"
    with contextlib.suppress(ProcessLookupError):
        os.kill(target, number)
    return f"{aim} {signal.Signals(number).name}"


def results(root: Path) -> dict[str, dict[str, Any]]:
    """Directory name -> what must not depend on how often a cell was killed."""
    found = {}
    for path in sorted(root.glob("chaos/smoke/*/record.json")):
        record = json.loads(path.read_text())
        budgets = {key: value for key, value in record["budgets"].items() if key != "seconds"}
        scores = (record["scores"] or {}).get("sha256")
        kept = {key: record[key] for key in ("cell", "status", "metrics", "parameters")}
        found[path.parent.name] = kept | {"budgets": budgets, "scores": scores}
    return found


def wait_for(condition: Any, seconds: float) -> bool:
    """Whether a condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(condition())


def chaos(place: Path, minutes: float, seed: int, slots: int, steps: int) -> int:
    """Run the claim undisturbed and disturbed, and compare."""
    folder = place / "experiments" / "chaos"
    folder.mkdir(parents=True)
    (folder / "claim.yaml").write_text(yaml.safe_dump(claim(steps)))
    if start(place, "undisturbed", slots).wait() != 0 or len(results(place / "undisturbed")) != CELLS:
        print((place / "undisturbed.log").read_text()[-2000:])
        print("the undisturbed run failed")
        return 1
    chance, struck, starts, left_over = random.Random(seed), dict[str, int](), 0, 0
    root, end = place / "disturbed", time.monotonic() + 60 * minutes
    sweep: subprocess.Popen[bytes] | None = None
    rounds = 0
    while time.monotonic() < end:
        if sweep is None or sweep.poll() is not None:
            if len(results(root)) == CELLS:  # go on killing: all anew, so long as there is time
                rounds += 1
                if problems := compare(place):
                    print("\n".join(problems))
                    return 1
                shutil.rmtree(root)
            sweep, starts = start(place, "disturbed", slots), starts + 1
        time.sleep(chance.expovariate(1 / 1.5))
        below = descendants(sweep.pid)
        # Mostly cells are waited for; else a loaded machine would see nothing but starts.
        if not any(kind == "cell" for _, kind in below) and chance.random() < 0.9:
            continue
        what = strike(sweep, chance)
        struck[what] = struck.get(what, 0) + 1
        if what.startswith("sweep"):
            sweep.wait()
            if not wait_for(lambda below=below: not any(alive(one) for one, _ in below), 15):
                left_over += 1
                print(f"processes outlived their sweep by 15 s: {[one for one in below if alive(one[0])]}")
    attempts = 0
    if sweep is not None:
        sweep.wait()
    while len(results(root)) < CELLS and attempts < ATTEMPTS:
        attempts += 1
        start(place, "disturbed", slots).wait()
    problems = compare(place)
    kinds = ", ".join(f"{count} x {what}" for what, count in sorted(struck.items()))
    print(f"{starts} starts, {rounds} whole runs before the last, {attempts} starts after the kills")
    print(f"{sum(struck.values())} strikes: {kinds}")
    print("\n".join(problems) or f"{CELLS} records equal those of the undisturbed run")
    return 1 if problems or left_over else 0


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def compare(place: Path) -> list[str]:
    """What differs between the two runs."""
    calm, wild = results(place / "undisturbed"), results(place / "disturbed")
    problems = [f"{name}: no record" for name in sorted(calm.keys() - wild.keys())]
    problems += [f"{name}: nobody asked for it" for name in sorted(wild.keys() - calm.keys())]
    for name in sorted(calm.keys() & wild.keys()):
        problems += [
            f"{name}: {key} is {wild[name][key]}, undisturbed {calm[name][key]}"
            for key in calm[name]
            if calm[name][key] != wild[name][key]
        ]
    return problems


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long to kill (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--slots", type=int, default=2, help="cells at a time")
    parser.add_argument("--steps", type=int, default=400, help="optimiser steps of a cell")
    parser.add_argument("--keep", type=Path, help="a new folder to work in, and to leave there")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True)
        return chaos(arguments.keep, arguments.minutes, arguments.seed, arguments.slots, arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        return chaos(Path(folder), arguments.minutes, arguments.seed, arguments.slots, arguments.steps)


if __name__ == "__main__":
    sys.exit(main())
