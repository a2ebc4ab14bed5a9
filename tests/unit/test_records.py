import json
import math
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from clozelab import records
from clozelab.records import (
    Metric,
    Record,
    Scores,
    append_record,
    essential,
    fingerprint,
    is_volatile,
    provenance,
    read_records,
    read_scores,
    write_record,
    write_scores,
)


def make(seed: int = 0, arm: str = "control", status: str = "finished", value: float = 1.5, **changes) -> Record:
    fields = {
        "claim": "some-claim",
        "arm": arm,
        "seed": seed,
        "scale": "smoke",
        "status": status,
        "cell": f"{arm}-{seed}",
        "config": {"seed": seed, "masking": {"copies": None}, "corruption": [0.8, 0.1, 0.1]},
        "provenance": {"commit": None},
        "budgets": {"steps": 3, "seconds": 0.25},
        "parameters": {"unique": 7},
        "metrics": {"heldout_mlm.loss": Metric(value, "min", 13, "fixed masks")},
    }
    return Record(**{**fields, **changes})


def test_a_record_survives_its_line_and_the_line_is_canonical():
    record = make(scores=Scores("scores.npz", "ab" * 32), reason="ünïcode")
    line = record.to_json()
    assert Record.from_json(line) == record
    assert "\n" not in line
    assert line == json.dumps(json.loads(line), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert json.loads(line)["schema"] == records.SCHEMA


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_makes_a_finished_record_diverged(value):
    record = make(value=value, budgets={"steps": 3, "flops": value})
    assert record.status == "diverged"
    assert record.metrics["heldout_mlm.loss"].value is None
    assert record.budgets["flops"] is None
    assert "heldout_mlm.loss" in record.reason
    assert "NaN" not in record.to_json()
    assert "Infinity" not in record.to_json()
    assert Record.from_json(record.to_json()) == record


def test_a_setting_of_infinity_stays_readable():
    assert make(config={"clip": math.inf}).config == {"clip": "inf"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": records.SCHEMA + 1}, f"schema {records.SCHEMA + 1}.*update"),
        ({"schema": None}, "schema version"),
        ({"colour": "red"}, "unknown fields: colour"),
        ({"arm": ...}, "lacks arm"),
        ({"status": "done"}, "'done'"),
        ({"metrics": {"x": {"value": 1}}}, "malformed metrics"),
        ({"metrics": {"x": {"value": 1, "direction": "up", "n": 1, "yardstick": ""}}}, "'up'"),
    ],
)
def test_a_line_that_is_no_record_is_refused_with_the_reason(change, says):
    fields = json.loads(make().to_json()) | change
    with pytest.raises(ValueError, match=says):
        Record.from_json(json.dumps({key: value for key, value in fields.items() if value is not ...}))


@pytest.mark.parametrize("line", ["[]", "{", "3"])
def test_reading_names_file_and_line(tmp_path, line):
    path = tmp_path / "cpu.jsonl"
    path.write_text(make().to_json() + "\n\n" + line + "\n")
    with pytest.raises(ValueError, match=r"cpu\.jsonl:3"):
        read_records(path)


def test_identity_does_not_depend_on_order_spelling_or_where_the_cell_runs():
    config = {"seed": 1, "model": {"hidden": 64, "dropout": 0.0}, "optimizer": {"lr": 1e-4}}
    same = {
        "runs_dir": "elsewhere",
        "claim": "c",
        "arm": "a",
        "scale": "cpu",
        "tracker": {"project": "p"},
        "trainer": {"num_workers": 3, "progress": True},
        "optimizer": {"lr": 0.0001},
        "model": {"dropout": 0, "hidden": 64.0},
        "seed": 1,
    }
    assert fingerprint(config | {"trainer": {}}, "data") == fingerprint(same, "data")
    assert len(fingerprint(config, "data")) == 16


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 2, "model": {"scale": 1}},
        {"seed": 1, "model": {"scale": 2}},
        {"seed": 1, "model": {"scale": None}},
        {"seed": 1, "model": {}},
        {"seed": 1, "model": {"scale": 1}, "more": 0},
    ],
)
def test_identity_changes_with_everything_else(other):
    config = {"seed": 1, "model": {"scale": 1}}
    assert fingerprint(config, "data") != fingerprint(other, "data")
    assert fingerprint(config, "data") != fingerprint(config, "other data")


def test_identity_is_the_same_in_another_process_and_for_ever():
    assert fingerprint({"seed": 3, "lr": 1e-4, "list": [0.8, 0.1]}, "d") == "458fa69178444fb8"


def test_volatile_keys_hold_at_any_depth_and_labels_at_the_top():
    assert is_volatile("data.num_workers")
    assert is_volatile("tracker.project")
    assert is_volatile("scale")
    assert not is_volatile("model.scale")
    assert not is_volatile("num_workers_of_another_kind")
    assert is_volatile("trainer.strategy")
    assert not is_volatile("masking.strategy")
    assert essential({"tracker": {"a": 1}, "data": {"cache": "/x", "b": 2}}) == {"data": {"b": 2}}


def test_a_record_file_is_written_whole_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "cell" / "record.json"
    write_record(path, make(seed=1))
    write_record(path, make(seed=2))
    assert read_records(path) == [make(seed=2)]
    assert [p.name for p in path.parent.iterdir()] == ["record.json"]
    assert read_records(tmp_path / "none.jsonl") == []


def test_a_crash_while_writing_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    write_record(path, make(seed=1))

    def crash(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="disk full"):
        write_record(path, make(seed=2))
    assert read_records(path) == [make(seed=1)]
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


def test_evidence_is_append_only(tmp_path):
    path = tmp_path / "evidence" / "cpu.jsonl"
    assert append_record(path, make(seed=0))
    before = path.read_bytes()
    assert append_record(path, make(seed=1))
    assert path.read_bytes().startswith(before)
    assert not append_record(path, make(seed=0))
    with pytest.raises(ValueError, match="another result of cell control-0"):
        append_record(path, make(seed=0, value=1.6))
    assert read_records(path) == [make(seed=0), make(seed=1)]


def test_a_failed_cell_may_get_a_result_and_a_diverged_one_may_not(tmp_path):
    path = tmp_path / "cpu.jsonl"
    append_record(path, make(seed=0, status="failed", metrics={}, reason="out of memory"))
    assert append_record(path, make(seed=0))
    append_record(path, make(seed=1, value=math.nan))
    with pytest.raises(ValueError, match="append-only"):
        append_record(path, make(seed=1))
    assert len(read_records(path)) == 3


def test_a_file_without_a_last_newline_keeps_its_last_record(tmp_path):
    path = tmp_path / "cpu.jsonl"
    path.write_text(make(seed=0).to_json())
    append_record(path, make(seed=1))
    assert read_records(path) == [make(seed=0), make(seed=1)]


def _append_many(path: Path, seeds: range) -> None:
    for seed in seeds:
        append_record(path, make(seed=seed))


def test_two_processes_that_append_lose_nothing(tmp_path):
    path = tmp_path / "cpu.jsonl"
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=_append_many, args=(path, range(k * 15, k * 15 + 15))) for k in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    assert sorted(record.seed for record in read_records(path)) == list(range(30))


def test_scores_are_found_again_unchanged_and_a_changed_file_is_refused(tmp_path):
    arrays = {"b": np.arange(6.0).reshape(3, 2), "a": np.array([0.0, 1.0, 1.0])}
    scores = write_scores(tmp_path / "scores.npz", arrays)
    again = write_scores(tmp_path / "again.npz", dict(reversed(arrays.items())))
    assert scores.path == "scores.npz"
    assert scores.sha256 == again.sha256
    loaded = read_scores(tmp_path / scores.path, scores.sha256)
    assert all(np.array_equal(loaded[name], arrays[name]) for name in arrays)
    write_scores(tmp_path / "scores.npz", {"a": np.zeros(3)})
    with pytest.raises(ValueError, match="sha256 differs"):
        read_scores(tmp_path / scores.path, scores.sha256)


def test_provenance_names_code_and_machine_but_nobody():
    found = provenance()
    assert found.keys() >= {"commit", "dirty", "code", "versions", "python", "platform", "cpu", "cores", "gpu"}
    assert found["versions"]["clozelab"]
    text = records.canonical_json(found)
    assert str(Path.home()) not in text
    assert str(Path(records.__file__).parent) not in text
    assert os.uname().nodename not in text


def test_provenance_does_not_report_the_commit_of_a_checkout_around_a_virtual_environment(tmp_path):
    package = tmp_path / "venv" / "clozelab"
    package.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert records._git(package) == {"commit": None, "dirty": None}


def test_provenance_takes_no_lock_of_the_repository(tmp_path):
    """A cell may be killed at any moment, and a lock that is left keeps its owner from committing."""
    package = tmp_path / "src" / "clozelab"
    package.mkdir(parents=True)
    (package / "a.py").write_text("a = 1\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *command], check=True)
    index = tmp_path / ".git" / "index"
    os.utime(package / "a.py", (1, 1))  # of which git would make a note in the index, under its lock
    before = index.read_bytes()
    found = records._git(package)
    assert found["commit"]
    assert found["dirty"] is False
    assert index.read_bytes() == before
    subprocess.run([*git, "status", "--porcelain"], check=True, capture_output=True)
    assert index.read_bytes() != before


def test_provenance_loads_no_training_library():
    code = "import sys; from clozelab.records import provenance; provenance(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
