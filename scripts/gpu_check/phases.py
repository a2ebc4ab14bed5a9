"""The phases, each in a child of its own: what it starts, and what it makes of what the child tells."""

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_check import claim_cells
from gpu_check.children import watch
from gpu_check.clock import Countdown
from gpu_check.layout import CLAIM, Refused
from gpu_check.plan import entries
from gpu_check.report import Report, code_hash

# Findings after which an entry is not tried again.
FINAL = {"measured", "failed"}
CLAIM_SCALE = {"full": "gpu", "smoke": "smoke"}
CLAIM_SEEDS = {"full": None, "smoke": 1}
# Below this a cell only starts.
LEAST_SECONDS = {"full": 45.0, "smoke": 20.0}
# What `clozelab run` takes to end its cells after SIGTERM.
GRACE = 15.0


@dataclasses.dataclass(frozen=True)
class Check:
    """What every phase needs."""

    report: Report
    size: str
    device: str
    out: Path
    runs: Path
    environment: dict[str, str]
    checkpoints: bool

    @property
    def log(self) -> Path:
        """The output of all children."""
        return self.out / "gpu_check.log"

    def watch(
        self, arguments: list[str], seconds: float, on_event: Callable[[dict[str, Any]], None], **more: Any
    ) -> int | None:
        """Run Python on `arguments`."""
        return watch([sys.executable, *arguments], seconds, self.log, self.environment, on_event, **more)


def ceiling(check: Check, seconds: float) -> None:
    """What the machine is and can do. Measured at every start: what follows is held against it.

    Raises:
        Refused: there is no such device, or torch does not start.
    """
    report = check.report
    found: dict[str, Any] = {}
    code = check.watch(["-m", "gpu_check.ceiling", check.device], seconds, found.update)
    environment = found.get("environment")
    if environment and check.device == "cuda" and not environment["cuda_available"]:
        raise Refused("torch sees no CUDA device here; `--size smoke --device cpu` tries the script itself")
    if environment is None or "ceiling" not in found:
        said = "its time was up" if code is None else f"exit code {code}"
        raise Refused(f"torch did not get through one matrix product ({said}); see {check.log.name}")
    report.data["environment"], report.data["ceiling"] = environment, found["ceiling"]
    versions = environment["versions"]
    report.set_stamp(
        f"code {code_hash()}, torch {versions['torch']}, transformers {versions['transformers']}, {environment['name']}"
    )
    for name, value in found["ceiling"].items():
        print(f"  {name} {value:,.2f}", flush=True)


def tests(check: Check, seconds: float) -> None:
    """The tests marked `gpu`; one whose outcome is known is not run again."""
    report = check.report
    if report.data["tests_complete"] == report.stamp:
        print("  done already", flush=True)
        return

    def heard(event: dict[str, Any]) -> None:
        name = event.pop("test")
        report.put("tests", name, **event)
        if event["outcome"] == "failed":
            print(f"  failed {name}: {event['message']}", flush=True)

    known = [name for name, test in report.data["tests"].items() if test["outcome"] != "interrupted"]
    command = ["-m", "pytest", "tests/gpu", "-m", "gpu", "-p", "gpu_check.outcomes", "-p", "no:cacheprovider"]
    code = check.watch([*command, *(f"--deselect={name}" for name in known)], seconds, heard)
    outcomes = Counter(test["outcome"] for test in report.data["tests"].values())
    why = {test["message"] for test in report.data["tests"].values() if test["outcome"] == "skipped"}
    print(
        "  " + "; ".join([*(f"{number} {outcome}" for outcome, number in outcomes.items()), *sorted(why)]), flush=True
    )
    if code in (0, 1, 5):  # passed, failed, none left
        report.data["tests_complete"] = report.stamp
        report.save()
    elif code is not None:
        message = f"pytest ended with exit code {code}; see {check.log.name}"
        report.put("tests", "pytest", outcome="failed", message=message)
        print(f"  {message}", flush=True)


def speed(check: Check, seconds: float) -> None:
    """The table. A child that dies takes one entry with it; the next child goes on with the rest."""
    report, left = check.report, Countdown(seconds)
    last: dict[str, str] = {}

    def heard(event: dict[str, Any]) -> None:
        key, status = event.pop("entry"), event["status"]
        last.update(key=key, status=status)
        if status == "measured":
            ceiling = report.data["ceiling"][f"{event['precision']}_tflops"]
            event["mfu"] = round(event["model_flops_per_second"] / 1e12 / ceiling, 4)
            said = f"{event['tokens_per_second']:,} tokens/s, {event['ms_per_step']} ms, MFU {event['mfu']:.1%}"
        else:
            said = f"{status}, {event['message']}"
        report.put("speed", key, **event)
        if status != "interrupted":
            print(f"  {key}: {said}", flush=True)

    while waiting := [
        entry for entry in entries(check.size) if report.data["speed"].get(entry.key, {}).get("status") not in FINAL
    ]:
        last.clear()
        request = {
            "device": check.device,
            "size": check.size,
            "seconds": left(),
            "entries": [dataclasses.asdict(entry) for entry in waiting],
        }
        code = check.watch(["-m", "gpu_check.speed", json.dumps(request)], left(), heard)
        if code in (0, None):
            return
        if last.get("status") == "failed":
            continue
        # It died without a word, of an entry or before the first one.
        key = last["key"] if last.get("status") == "interrupted" else waiting[0].key
        report.put("speed", key, status="failed", message=f"the process died, exit code {code}; see {check.log.name}")
        print(f"  {key}: the process died, exit code {code}", flush=True)


def claim(check: Check, seconds: float) -> None:
    """As many cells of the claim as fit; one that is cut short goes on from its checkpoint in the same run folder."""
    report = check.report
    scale, seeds = CLAIM_SCALE[check.size], CLAIM_SEEDS[check.size]
    folder = check.runs / CLAIM / scale

    def note(message: str) -> None:
        cells = claim_cells.states(folder)
        done = sum(cell["state"] == "done" for cell in cells)
        report.data["claim"] = {
            "claim": CLAIM,
            "scale": scale,
            "planned": len(cells),
            "done": done,
            "failed": sum(cell["state"] == "failed" for cell in cells),
            "cells": cells,
            "message": message,
            "stamp": report.stamp,
        }
        report.save()

    if report.data["claim"].get("planned") and report.data["claim"]["done"] == report.data["claim"]["planned"]:
        print("  done already", flush=True)
        return
    if seconds - GRACE < LEAST_SECONDS[check.size]:
        note(f"not started: {seconds:.0f} s left")
        print(f"  not started: {seconds:.0f} s left", flush=True)
        return
    packed = -1

    def tick() -> None:
        nonlocal packed
        done = claim_cells.done(folder)
        if done > packed >= 0:
            claim_cells.pack(folder, check.out, check.checkpoints)
            note("running")
            print(f"  {done} cells done", flush=True)
        packed = done

    command = ["-m", "clozelab.cli", "run", CLAIM, "--scale", scale, "--runs-dir", str(check.runs)]
    command += [] if seeds is None else ["--seeds", str(seeds)]
    message = "ended by a signal"
    try:
        code = check.watch(command, seconds - GRACE, lambda event: None, on_tick=tick, grace=GRACE)
        message = {0: "complete", None: "its time was up"}.get(code, f"exit code {code}: {_last_line(check.log)}")
    finally:
        claim_cells.pack(folder, check.out, check.checkpoints)
        note(message)
    found = report.data["claim"]
    print(f"  {found['done']} of {found['planned']} cells done; {found['message']}", flush=True)


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
