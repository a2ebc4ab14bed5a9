"""The command: phase after phase, each within its share of the time, then one line that sums up."""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu_check import claim_cells, phases, wheels
from gpu_check.children import Stopped
from gpu_check.clock import Clock
from gpu_check.layout import ROOT, Refused, environment
from gpu_check.plan import entries
from gpu_check.report import NAME, Report

# What part of the whole time each phase may take; the last one takes what is left.
PHASES: dict[str, tuple[Callable[[phases.Check, float], None], float]] = {
    "ceiling": (phases.ceiling, 0.15),
    "tests": (phases.tests, 0.2),
    "speed": (phases.speed, 0.45),
    "claim": (phases.claim, 1.0),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """One line."""
        self.exit(2, f"gpu_check: {message}; see scripts/gpu_check.sh --help\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="scripts/gpu_check.sh",
        description="Tests, speed beside Hugging Face, MFU and a piece of a claim on a GPU, within a time limit.",
        epilog="Exit codes: 0 done or out of time; 1 a test, a measurement or a cell failed; 2 refused; 128 + signal.",
        allow_abbrev=False,
    )
    parser.add_argument("--seconds", type=float, default=540.0, metavar="N", help="whole time (default: 540)")
    out = os.environ.get("OUT") or "gpu_check_out"
    parser.add_argument("--out", type=Path, default=Path(out), metavar="DIR", help="results ($OUT, or gpu_check_out)")
    runs = ROOT / "runs" / "gpu_check"
    parser.add_argument("--runs", type=Path, default=runs, metavar="DIR", help="run folder (default: runs/gpu_check)")
    parser.add_argument("--size", choices=("full", "smoke"), default="full", help="smoke: tiny, to try the script")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--phases", nargs="+", choices=list(PHASES), default=list(PHASES), help="only these")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on with the results of another --out folder")
    parser.add_argument("--checkpoints", action="store_true", help="keep those of unfinished cells with the records")
    parser.add_argument("--wheels", action="store_true", help="only fetch what a bare machine lacks into --wheels-dir")
    parser.add_argument("--wheels-dir", type=Path, default=ROOT / ".whl", metavar="DIR", help="(default: .whl)")
    options = parser.parse_args(argv)
    if options.seconds <= 0:
        parser.error(f"--seconds is {options.seconds:g}; it must be greater than 0")
    if options.size == "full" and options.device == "cpu" and not options.wheels:
        parser.error("--size full needs --device cuda; on a CPU take --size smoke")
    if options.resume and not (options.resume / NAME).is_file():
        parser.error(f"--resume {options.resume} holds no {NAME}; name the --out folder of an earlier start")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check."""
    options = _parse(argv)

    def stop(number: int, frame: object) -> None:
        raise Stopped(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        return wheels.download(options.wheels_dir) if options.wheels else check(options)
    except Refused as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"gpu_check: {error.filename}: {error.strerror}; choose another folder", file=sys.stderr)
        return 2


def check(options: argparse.Namespace) -> int:
    """Every phase that was asked for and still fits.

    Raises:
        Refused: the check cannot run here.
    """
    clock = Clock(options.seconds)
    out, runs = options.out.absolute(), options.runs.absolute()
    _make(out)
    _make(runs)
    if options.resume:
        if not (out / NAME).exists():
            shutil.copyfile(options.resume / NAME, out / NAME)
        claim_cells.unpack(options.resume, runs, phases.CLAIM_SCALE[options.size])
    report = Report(out, options.size, options.device)
    site = runs / "site"
    begin = time.monotonic()
    report.data["wheels"] = wheels.install(options.wheels_dir, site)
    report.data["seconds"]["wheels"] = round(time.monotonic() - begin, 1)
    report.save()
    if missing := report.data["wheels"]["missing"]:
        raise Refused(
            f"missing here: {', '.join(missing)}; fetch them with scripts/gpu_check.sh --wheels and take .whl along"
        )
    made = phases.Check(
        report, options.size, options.device, out, runs, environment(site, runs, options.device), options.checkpoints
    )
    code = 0
    try:
        for name, (phase, part) in PHASES.items():
            # The ceiling says what everything else is measured with.
            if name in options.phases or name == "ceiling":
                _timed(made, name, phase, clock.share(part))
    except Stopped as error:
        print(f"gpu_check: ended by {error}; start it again to go on", file=sys.stderr)
        code = 128 + error.number
    report.data["seconds"]["total"] = round(clock.spent(), 1)
    summary = summarise(report.data)
    report.data["summary"] = summary
    report.save()
    print(json.dumps(summary), flush=True)
    return code or int(summary["failures"] > 0)


def _make(folder: Path) -> None:
    """A folder that git does not see."""
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / ".gitignore").write_text("*\n")


def _timed(made: phases.Check, name: str, phase: Callable[[phases.Check, float], None], seconds: float) -> None:
    print(f"{name}: at most {seconds:.0f} s", flush=True)
    begin = time.monotonic()
    try:
        if seconds > 0:
            phase(made, seconds)
    finally:
        made.report.data["seconds"][name] = round(time.monotonic() - begin, 1)
        made.report.save()


def summarise(data: dict[str, Any]) -> dict[str, Any]:
    """The report in one line."""
    outcomes = [test["outcome"] for test in data["tests"].values()]
    rows = data["speed"]
    statuses = [row["status"] for row in rows.values()]
    claim = data["claim"]
    ours = [row for key, row in rows.items() if key.startswith("ours ")]
    failures = (
        outcomes.count("failed") + sum(row["status"] == "failed" for row in ours) + int(claim.get("failed", 0))
    )  # not those of the peer
    return {
        "device": data["environment"].get("name"),
        "torch": data["environment"].get("versions", {}).get("torch"),
        "ceiling": {key: round(value, 1) for key, value in data["ceiling"].items()},
        "tests": {key: outcomes.count(key) for key in ("passed", "failed", "skipped", "interrupted")},
        "speed": {
            "measured": statuses.count("measured"),
            "failed": statuses.count("failed"),
            "of": len(entries(data["size"])),
            "best_mfu": max((row["mfu"] for row in ours if row["status"] == "measured"), default=None),
            "over_hugging_face": ratios(rows),
        },
        "claim": {key: claim.get(key, 0) for key in ("done", "failed", "planned")},
        "failures": failures,
        "seconds": data["seconds"],
    }


def ratios(rows: dict[str, Any]) -> dict[str, float]:
    """Our tokens a second over theirs, of each pair that was measured."""
    found = {}
    for key, row in rows.items():
        peer, _, what = key.partition(" ")
        other = rows.get(f"hugging_face {what}", {})
        if peer == "ours" and row["status"] == other.get("status") == "measured":
            found[what] = round(row["tokens_per_second"] / other["tokens_per_second"], 2)
    return found


if __name__ == "__main__":
    sys.exit(main())
