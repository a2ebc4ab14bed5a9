"""Every way in which a cell can die, on every launcher: the others finish, and what died is named, with its cause.

One claim a launcher: two sound cells, and one for each fault of `tests.e2e.faults`.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from clozelab import records
from tests.e2e.conftest import TINY
from tests.e2e.tracked import read_wandb

pytestmark = pytest.mark.slow

SIX_STEPS = [
    *(o for o in TINY if not o.startswith(("budget.steps", "trainer.log_every", "evaluation", "tracker"))),
    "budget.steps=6",
    "trainer.log_every=1",
    "trainer.checkpoint_every=2",
    "evaluation=heldout_mlm",
    "evaluation.heldout_mlm.examples=32",
]

# Fault -> what is said of it. The one that takes longest is first: the others go on beside it.
FAULTS = {
    "hangs": "hung or too slow: ended after its time limit of 60 s",
    "raises": "RuntimeError: a fault of the test's own",
    "exits": "SystemExit: 0",
    "sigkill": "ended by signal SIGKILL",
    "eats": "out of memory: ",
    "nan": "diverged: the loss is not finite",
}
SOUND = ("before", "after")

LAUNCHERS = {
    "local": ("launcher.slots=2",),
    "joblib": ("launcher=joblib", "launcher.slots=2"),
    "submitit": ("launcher=submitit", "launcher.cluster=local"),
    "ray": ("launcher=ray", "launcher.nodes_cpus=2"),
}


def claim(tmp_path: Path, arms: dict[str, list[str]], tracker: str = "none") -> None:
    """Write the claim `matrix`, whose arms differ in how they die."""
    first, *_, last = arms
    text = {
        "id": "matrix",
        "title": "Faults",
        "says": "A fault stops nobody else.",
        "sources": [{"paper": "none", "arxiv": "0000.00000", "year": 2026, "where": "a test"}],
        "arms": {name: {"overrides": ["schedule=faulty", *overrides]} for name, overrides in arms.items()},
        "control": first,
        "varies": ["schedule.how", "schedule.at", "schedule.once"],
        "matched": {"steps": 0.0},
        "predictions": [
            {
                "id": "none",
                "says": "Nothing.",
                "metric": "heldout_mlm.loss",
                "relation": f"{last} < {first}",
                "basis": "arithmetic",
            }
        ],
        "seeds": [0],
        "scales": {
            "smoke": {
                "overrides": [*SIX_STEPS, f"tracker={tracker}"],
                "seeds": 1,
                "says": "seconds",
                "expected_time": "seconds",
            }
        },
    }
    folder = tmp_path / "experiments" / "matrix"
    folder.mkdir(parents=True)
    (folder / "claim.yaml").write_text(yaml.safe_dump(text, sort_keys=False))


def clozelab(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    process = start(tmp_path, *arguments)
    output, errors = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a command whose processes, and theirs, can be told from all others by a mark in their environment."""
    environment = os.environ | {"CLOZELAB_OPTIONS": "tests.e2e.faults", "CLOZELAB_TEST_MARK": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "clozelab.cli", *arguments]
    return subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def left_over(tmp_path: Path) -> list[str]:
    """Command lines of the marked processes that are still there after half a minute."""
    deadline = time.monotonic() + 30
    while (found := list(marked(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def marked(tmp_path: Path) -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"CLOZELAB_TEST_MARK={tmp_path}\0".encode() in (process / "environ").read_bytes():
                yield (process / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it is gone, or somebody else's
            continue


def tracked_exits(directory: Path) -> list[int | None]:
    """The exit code that each offline run of a cell was closed with; None: it is still open."""
    return [read_wandb(path).code for path in sorted(directory.glob("wandb/offline-run-*/*.wandb"))]


class Swept(NamedTuple):
    """A claim that was run on a launcher."""

    done: subprocess.CompletedProcess[str]
    root: Path

    def directory(self, arm: str) -> Path:
        """The run directory of an arm's only cell."""
        (found,) = self.root.glob(f"runs/matrix/smoke/{arm}-s0-*")
        return found

    def summary(self, arm: str) -> str:
        """The line of the summary that names an arm's cell, and the log beside it."""
        _, _, summary = self.done.stderr.partition(f"{len(FAULTS)} of {len(FAULTS) + len(SOUND)} failed:\n")
        lines = summary.splitlines()
        (index,) = [i for i, line in enumerate(lines) if line.startswith(f"  {arm} seed 0: ")]
        assert lines[index + 1].strip() == f"log: {self.directory(arm).relative_to(self.root) / 'train.log'}"
        return lines[index].removeprefix(f"  {arm} seed 0: ")


@pytest.fixture(scope="module", params=list(LAUNCHERS))
def swept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    launcher: str = request.param
    if launcher != "local" and importlib.util.find_spec(launcher) is None:
        pytest.skip(f"{launcher} is not installed")
    root = tmp_path_factory.mktemp(launcher)
    arms = {"before": ["schedule.how=none"]} | {how: [f"schedule.how={how}"] for how in FAULTS}
    claim(root, arms | {"after": ["schedule.how=none", "schedule.at=0.6"]}, tracker="wandb")
    limits = ("launcher.memory=2", "launcher.timeout=1")  # a cell takes 2 s; busy machines take their time
    return Swept(clozelab(root, "run", "matrix", "--scale", "smoke", *LAUNCHERS[launcher], *limits), root)


@pytest.mark.parametrize("arm", SOUND)
def test_the_others_finish(swept: Swept, arm: str) -> None:
    (record,) = records.read_records(swept.directory(arm) / "record.json")
    assert record.status == "finished"
    assert record.budgets["steps"] == 6
    assert tracked_exits(swept.directory(arm)) == [0]
    assert f"  {arm} seed 0" not in swept.done.stderr
    assert not (swept.directory(arm) / "failure.json").exists()


@pytest.mark.parametrize("fault", FAULTS)
def test_what_died_is_named_with_its_cause_and_closed_as_failed(swept: Swept, fault: str) -> None:
    directory, log = swept.directory(fault), (swept.directory(fault) / "train.log").read_text()
    assert swept.summary(fault).startswith(FAULTS[fault])
    (code,) = tracked_exits(directory)
    assert code not in (None, 0)
    if fault == "nan":
        (record,) = records.read_records(directory / "record.json")
        assert record.status == "diverged"
        assert record.reason in log
        return
    assert not (directory / "record.json").exists()
    failure: dict[str, Any] = json.loads((directory / "failure.json").read_text())
    assert failure["status"] == "failed"
    assert failure["reason"] == swept.summary(fault)
    assert Path(failure["log"]).name == "train.log"
    if fault in ("raises", "exits"):
        assert "Traceback (most recent call last)" in log
        assert "in _harm" in log
    else:
        assert f"clozelab supervisor: {failure['reason']}" in log


def test_the_command_says_so(swept: Swept) -> None:
    assert swept.done.returncode == 1
    assert "Traceback" not in swept.done.stderr
    assert swept.done.stderr.count("[1/8]") == swept.done.stderr.count("[8/8]") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_process_is_left(swept: Swept) -> None:
    assert not left_over(swept.root)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_interrupted_sweep_leaves_nothing_open(tmp_path: Path, launcher: str) -> None:
    if launcher != "local" and importlib.util.find_spec(launcher) is None:
        pytest.skip(f"{launcher} is not installed")
    hangs = {name: ["schedule.how=hangs", f"schedule.at={at}"] for name, at in (("one", 0.5), ("other", 0.6))}
    claim(tmp_path, {**hangs, "never": ["schedule.how=none"]}, tracker="wandb")
    process = start(tmp_path, "run", "matrix", "--scale", "smoke", *LAUNCHERS[launcher])
    at_step = {"one": 3, "other": 4}
    deadline = time.monotonic() + 300
    while not all(rows(tmp_path, arm) == step for arm, step in at_step.items()):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the cells never came to where they hang"
        time.sleep(0.1)
    process.terminate()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "interrupted: 0 of 3 done" in errors
    assert not left_over(tmp_path)
    for arm in at_step:
        (directory,) = tmp_path.glob(f"runs/matrix/smoke/{arm}-s0-*")
        assert json.loads((directory / "failure.json").read_text())["status"] == "killed"
        (code,) = tracked_exits(directory)
        assert code not in (None, 0)


def rows(tmp_path: Path, arm: str) -> int:
    """Steps that an arm's only cell has logged."""
    return sum(
        len(path.read_text().splitlines()) for path in tmp_path.glob(f"runs/matrix/smoke/{arm}-s0-*/metrics.jsonl")
    )


def test_another_attempt_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    arms = {how: [f"schedule.how={how}", f"schedule.once={tmp_path / how}"] for how in ("raises", "sigkill")}
    claim(tmp_path, {"sound": ["schedule.how=none"], **arms}, tracker="wandb")
    done = clozelab(tmp_path, "run", "matrix", "--scale", "smoke", "launcher.retries=1", "launcher.slots=2")
    assert done.returncode == 0, done.stderr
    assert "2 of 3 done after a failed attempt:" in done.stderr
    for how in arms:
        assert f"  {how} seed 0: {FAULTS[how]}\n" in done.stderr
        (directory,) = tmp_path.glob(f"runs/matrix/smoke/{how}-s0-*")
        (record,) = records.read_records(directory / "record.json")
        assert record.provenance["resumed_at_step"] == 2
        assert record.budgets["steps"] == 6
        assert not (directory / "failure.json").exists()
        assert FAULTS[how] in (directory / "train.log").read_text()
        assert tracked_exits(directory) == [0]
    assert not left_over(tmp_path)


def test_failing_fast_starts_nothing_more(tmp_path: Path) -> None:
    arms = {"raises": ["schedule.how=raises"]} | {
        f"sound{i}": ["schedule.how=none", f"schedule.at=0.{i}"] for i in (1, 2)
    }
    claim(tmp_path, arms)
    done = clozelab(tmp_path, "run", "matrix", "--scale", "smoke", "launcher.fail_fast=true", "launcher.slots=1")
    assert done.returncode == 1
    assert "1 of 3 failed:\n  raises seed 0: RuntimeError" in done.stderr
    assert "2 not run: sound1 seed 0, sound2 seed 0\n" in done.stderr
    assert not list(tmp_path.glob("runs/matrix/smoke/sound*/train.log"))


def train(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return clozelab(tmp_path, "train", "-m", *SIX_STEPS, "tracker=none", *arguments)


@pytest.mark.parametrize("launcher", ["local_processes", "joblib"])
def test_an_ordinary_sweep_fails_as_well_as_a_claim(tmp_path: Path, launcher: str) -> None:
    if launcher == "joblib" and importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher") is None:
        pytest.skip("hydra-joblib-launcher is not installed")
    how = "schedule.how=raises,none,sigkill,exits"
    done = train(tmp_path, f"hydra/launcher={launcher}", "schedule=faulty", how)
    assert done.returncode == 1, done.stderr
    _, said, summary = done.stderr.partition("3 of 4 failed:\n")
    assert said, done.stderr
    for fault in ("raises", "sigkill", "exits"):
        named = [line for line in summary.splitlines() if line.endswith(f"schedule.how={fault}: {FAULTS[fault]}")]
        assert len(named) == 1, summary
    assert "Traceback" not in done.stderr
    assert len(list(tmp_path.glob("runs/train/*/record.json"))) == 1
    assert len(list(tmp_path.glob("runs/train/*/failure.json"))) == 3
    assert not left_over(tmp_path)


def test_globs_and_ranges(tmp_path: Path) -> None:
    done = train(tmp_path, "seed=range(0,2)", "masking=glob(s*)", "schedule=linear")
    assert done.returncode == 0, done.stderr
    found = [records.read_records(path)[0] for path in tmp_path.glob("runs/train/*/record.json")]
    assert sorted(record.seed for record in found) == [0, 0, 1, 1]
    assert len({json.dumps(record.config["masking"]) for record in found}) == 2


def test_optuna_is_told_of_the_metric(tmp_path: Path) -> None:
    if importlib.util.find_spec("hydra_plugins.hydra_optuna_sweeper") is None:
        pytest.skip("hydra-optuna-sweeper is not installed")
    search = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=3")
    done = train(tmp_path, *search, "optimizer.lr=interval(1e-4,1e-2)", "objective=heldout_mlm.loss")
    assert done.returncode == 0, done.stderr
    found = [records.read_records(path)[0] for path in tmp_path.glob("runs/train/*/record.json")]
    assert len(found) == 3
    best = min(found, key=lambda record: record.metrics["heldout_mlm.loss"].value)
    (results,) = tmp_path.glob("runs/multirun/*/optimization_results.yaml")
    told = yaml.safe_load(results.read_text())
    assert told["best_value"] == pytest.approx(best.metrics["heldout_mlm.loss"].value)
    assert told["best_params"]["optimizer.lr"] == pytest.approx(best.config["optimizer"]["lr"])
