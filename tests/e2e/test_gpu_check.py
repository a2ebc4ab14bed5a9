"""`scripts/gpu_check.sh` from end to end, tiny and on the CPU: what it writes, that it goes on, what it refuses."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.sh"
SUMMARY = {"device", "torch", "ceiling", "tests", "speed", "claim", "failures", "seconds"}


def start(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    environment.pop("OUT", None)
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder of a whole check, and what it printed."""
    folder = tmp_path_factory.mktemp("gpu_check")
    done = start("--size", "smoke", "--device", "cpu", "--out", folder / "out", "--runs", folder / "runs")
    assert done.returncode == 0, done.stderr + done.stdout + (folder / "out" / "gpu_check.log").read_text()[-3000:]
    return folder, done


def report(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "out" / "gpu_check.json").read_text()))


@pytest.mark.slow
def test_the_report_holds_every_phase(smoke: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = smoke
    found = report(folder)
    assert json.loads(done.stdout.splitlines()[-1]) == found["summary"]
    assert found["summary"].keys() == SUMMARY
    assert (found["schema"], found["size"], found["device"], found["starts"]) == (1, "smoke", "cpu", 1)
    assert found["environment"]["versions"]["torch"]
    assert {"bf16_tflops", "fp32_tflops", "copy_gb_per_s"} <= found["ceiling"].keys()
    assert found["wheels"]["missing"] == []
    assert {"wheels", "ceiling", "tests", "speed", "claim", "total"} == found["seconds"].keys()

    assert found["tests"]
    for test in found["tests"].values():
        assert test["outcome"] == "skipped"
        assert "CUDA" in test["message"]

    assert {f"{peer} bert_tiny 32 {how}" for peer in ("ours", "hugging_face") for how in ("eager", "compiled")} == set(
        found["speed"]
    )
    for row in found["speed"].values():
        assert row["status"] == "measured"
        assert row["tokens_per_second"] == pytest.approx(row["sequences"] * 32 / row["ms_per_step"] * 1000, rel=0.01)
        ceiling = found["ceiling"][f"{row['precision']}_tflops"]
        assert row["mfu"] == pytest.approx(row["model_flops_per_second"] / 1e12 / ceiling, abs=1e-3)
    assert found["summary"]["speed"]["over_hugging_face"].keys() == {"bert_tiny 32 eager", "bert_tiny 32 compiled"}

    claim = found["claim"]
    assert (claim["claim"], claim["scale"], claim["done"], claim["planned"]) == ("sop-vs-nsp", "smoke", 3, 3)
    assert {cell["state"] for cell in claim["cells"]} == {"done"}
    with tarfile.open(folder / "out" / "sop-vs-nsp-smoke.tar.gz") as archive:
        names = [Path(name).name for name in archive.getnames()]
    assert [names.count(name) for name in ("plan.json", "record.json", "scores.npz", "last.ckpt")] == [1, 3, 3, 0]
    assert len([path for path in (folder / "out").iterdir() if path.name != ".gitignore"]) == 3


@pytest.mark.slow
def test_a_second_start_goes_on_elsewhere_and_repeats_nothing(
    smoke: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    # From the output folder alone, as if the first machine were gone; one measurement and all cells are missing.
    folder, _ = smoke
    kept = folder / "kept"
    kept.mkdir()
    for name in ("gpu_check.json", "sop-vs-nsp-smoke.tar.gz"):
        (kept / name).write_bytes((folder / "out" / name).read_bytes())
    before = json.loads((kept / "gpu_check.json").read_text())
    removed = "ours bert_tiny 32 eager"
    del before["speed"][removed]
    (kept / "gpu_check.json").write_text(json.dumps(before))
    out, runs = folder / "second" / "out", folder / "second" / "runs"
    done = start("--size", "smoke", "--device", "cpu", "--out", out, "--runs", runs, "--resume", kept)
    assert done.returncode == 0, done.stderr + done.stdout
    after = json.loads((out / "gpu_check.json").read_text())
    assert after["starts"] == 2
    assert after["speed"].pop(removed)["status"] == "measured"
    assert after["speed"] == before["speed"]
    assert after["claim"] == before["claim"]
    records = sorted(path.parent.name for path in runs.glob("sop-vs-nsp/smoke/*/record.json"))
    assert records == sorted(path.parent.name for path in (folder / "runs").glob("sop-vs-nsp/smoke/*/record.json"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--seconds", "0"], "--seconds is 0"),
        (["--size", "huge"], "huge"),
        (["--fast"], "--fast"),
        (["--device", "cpu"], "--size smoke"),
        (["--resume", "nowhere"], "nowhere"),
    ],
)
def test_a_bad_argument_is_refused_in_one_line(arguments: list[str], says: str, tmp_path: Path) -> None:
    done = start(*arguments, "--out", tmp_path / "out", "--runs", tmp_path / "runs")
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert not (tmp_path / "out").exists()


def test_a_report_of_another_check_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gpu_check.json").write_text('{"schema": 1, "size": "full", "device": "cuda"}')
    done = start("--size", "smoke", "--device", "cpu", "--out", tmp_path, "--runs", tmp_path / "runs")
    assert done.returncode == 2
    assert "choose another --out" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_every_requirement_travels_or_is_named_as_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from gpu_check import wheels

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=!~ \[;]", requirement)[0].lower() for requirement in project["dependencies"]}
    assert names == names & ({name.lower() for name in wheels.NEEDED} | wheels.LEFT_BEHIND.keys())
    assert not {name.lower() for name in wheels.NEEDED} & wheels.LEFT_BEHIND.keys()
