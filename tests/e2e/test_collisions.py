"""Two commands in the same second: on one cache, one run root, one claim."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from clozelab import records
from clozelab.running.directories import unique_directory
from tests.e2e.conftest import TINY
from tests.e2e.test_claim_run import CLAIM, workplace  # noqa: F401

# An option module of the user's own, which counts how often a store is built, and makes that slow.
COUNTING = """
import os, time
import clozelab.data.store as store
build = store.build
def counted(*arguments, **named):
    with open(os.environ["BUILDS"], "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(3)
    return build(*arguments, **named)
store.build = counted
"""


def both(workplace: Path, *commands: list[str]) -> list[tuple[int, str]]:  # noqa: F811
    """Start all at once; (exit code, stderr) of each."""
    (workplace / "counting.py").write_text(COUNTING)
    environment = os.environ | {
        "PYTHONPATH": f"{workplace}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "CLOZELAB_CACHE": str(workplace / "cache"),
        "CLOZELAB_OPTIONS": "counting",
        "BUILDS": str(workplace / "builds"),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "clozelab.cli", *command],
            cwd=workplace,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    told = [process.communicate()[1] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, told, strict=True)]


def builds(workplace: Path) -> int:  # noqa: F811
    return len((workplace / "builds").read_text().splitlines())


@pytest.mark.slow
def test_one_claim_twice_runs_once(workplace: Path) -> None:  # noqa: F811
    """One is refused by name (or, coming late, finds all done); no cell is trained twice."""
    command = ["run", "toy", "--scale", "smoke", "--seeds", "1"]
    ended = both(workplace, command, command)
    assert sorted(code for code, _ in ended) in ([0, 2], [0, 0]), ended
    for code, told in ended:
        assert "Traceback" not in told
        if code == 2:
            (line,) = [line for line in told.splitlines() if line.startswith("clozelab: ")]
            assert "is in use by another `clozelab run toy`" in line
            assert "runs/toy/smoke" in line
    logs = [path.read_text() for path in workplace.glob("runs/toy/smoke/*/train.log")]
    assert [log.count("trained: ") for log in logs] == [1, 1]
    assert builds(workplace) == 1


@pytest.mark.slow
def test_two_claims_and_two_scales_do_not_meet(workplace: Path) -> None:  # noqa: F811
    other = yaml.safe_load(yaml.safe_dump(CLAIM | {"id": "other"}))
    other["scales"]["gpu"] = yaml.safe_load(yaml.safe_dump(other["scales"]["smoke"]))
    other["scales"]["gpu"]["overrides"].append("budget.steps=5")
    (workplace / "experiments/other").mkdir()
    (workplace / "experiments/other/claim.yaml").write_text(yaml.safe_dump(other))
    tail = ["--seeds", "1", "--slots", "1"]
    ended = both(
        workplace,
        ["run", "toy", "--scale", "smoke", *tail],
        ["run", "other", "--scale", "smoke", *tail],
        ["run", "other", "--scale", "gpu", *tail],
    )
    assert [code for code, _ in ended] == [0, 0, 0], ended
    assert builds(workplace) == 1
    for folder in ("toy/smoke", "other/smoke", "other/gpu"):
        found = [records.read_records(path)[0] for path in workplace.glob(f"runs/{folder}/*/record.json")]
        assert sorted(record.arm for record in found) == ["moving", "still"]
        assert {f"{record.claim}/{record.scale}" for record in found} == {folder}


@pytest.mark.slow
def test_two_trainings_in_one_second_have_a_directory_each(workplace: Path) -> None:  # noqa: F811
    ended = both(workplace, ["train", *TINY], ["train", *TINY])
    assert [code for code, _ in ended] == [0, 0], ended
    found = list(workplace.glob("runs/train/*/record.json"))
    assert len(found) == 2
    assert len({path.parent for path in found}) == 2
    assert len({records.read_records(path)[0].cell for path in found}) == 1
    assert builds(workplace) == 1


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    made = [unique_directory(tmp_path / "train", "20260101-000000-train-s0") for _ in range(3)]
    assert [path.name[-4:] for path in made] == ["n-s0", "s0-2", "s0-3"]
