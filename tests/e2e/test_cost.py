"""`clozelab cost`: what it prints, that it reads no data, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def cost(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in an empty folder, with an empty cache and no network, at a width at which no line is broken."""
    environment = {**os.environ, "CLOZELAB_CACHE": str(folder / "cache"), "COLUMNS": "160", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "clozelab.cli", "cost", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)


def found(folder: Path, *arguments: str) -> dict[str, Any]:
    done = cost(folder, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert isinstance(loaded, dict)
    return loaded


def test_a_preset_is_counted_without_its_data(tmp_path: Path) -> None:
    shape = ["tokenizer.vocab_size=30000", "format.max_length=128", "batch_size=16", "budget.tokens=2000000"]
    run = found(tmp_path, "model=albert_base", "corpus=text", "corpus.paths=[nowhere.txt]", "--tflops", "2", *shape)
    assert run["parameters"]["unique"] == 11_221_680
    assert run["parameters"]["shared"] == 7_087_872  # one layer of BERT base
    assert run["parameters"]["applied"] == 11_221_680 + 11 * 7_087_872
    flops = run["flops"]
    assert flops["per_step"] == pytest.approx(flops["per_token"] * 16 * 128)
    assert flops["per_step"] == pytest.approx(sum(flops["parts_per_step"].values()))
    assert run["budget"] == {"steps": 977, "tokens": 977 * 16 * 128}  # 2,000,000 / 2,048 = 976.6
    assert flops["total"] == 977 * flops["per_step"]
    assert run["hours"] == pytest.approx(flops["total"] / 2e12 / 3600)
    for device in ("cpu", "gpu"):
        parts = [run["memory"][device][key] for key in ("weights", "gradients", "moments", "activations")]
        assert run["memory"][device]["total"] == sum(parts)
    assert not list(tmp_path.iterdir())


def test_tables_are_for_reading(tmp_path: Path) -> None:
    done = cost(tmp_path, "model=bert_tiny", "task=mlm_nsp")
    assert done.returncode == 0, done.stderr
    for words in ("parameters", "FLOPs a token", "FLOPs in all", "activations", "full", "tokenizer.vocab_size"):
        assert words in done.stdout


def test_micro_batches_keep_less_and_cost_the_same(tmp_path: Path) -> None:
    whole = found(tmp_path, "model=bert_tiny", "batch_size=32")
    pieces = found(tmp_path, "model=bert_tiny", "batch_size=32", "trainer.accumulate=4")
    assert pieces["flops"] == whole["flops"]
    assert pieces["memory"]["sequences"] == 8
    assert pieces["memory"]["cpu"]["activations"] < 0.3 * whole["memory"]["cpu"]["activations"]


def test_ranks_that_part_a_model_keep_a_share_each(tmp_path: Path) -> None:
    shape = ["model=bert_tiny", "batch_size=32", "trainer.devices=4"]
    whole, share = (found(tmp_path, *shape, f"trainer.strategy={one}")["memory"]["gpu"] for one in ("ddp", "fsdp"))
    for key in ("weights", "gradients", "moments"):
        assert share[key] == pytest.approx(whole[key] / 4, abs=1)
    assert share["activations"] == whole["activations"]
    assert share["total"] < whole["total"]


def test_the_vocabulary_of_a_file_is_read(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefg"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    run = found(tmp_path, "model=bert_tiny", "tokenizer=file", "tokenizer.path=vocab.txt")
    assert (run["model"]["vocab_size"], run["model"]["vocab_is_trained"]) == (len(words), False)


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        (["budget=steps", "budget.steps=125000"], 125_000),
        (["budget=flops", "budget.flops=1e3"], 1),
        (["budget=seconds"], None),
    ],
)
def test_every_budget_says_how_many_steps_it_holds(tmp_path: Path, budget: list[str], steps: int | None) -> None:
    assert found(tmp_path, "model=bert_tiny", *budget)["budget"]["steps"] == steps


def test_seconds_hold_the_steps_of_a_speed(tmp_path: Path) -> None:
    run = found(tmp_path, "model=bert_tiny", "budget=seconds", "budget.seconds=3600", "--tflops", "1")
    assert run["hours"] == pytest.approx(1, rel=0.001)


def test_a_claim_costs_its_arms_times_its_seeds(tmp_path: Path) -> None:
    claim = found(tmp_path, "sop-vs-nsp", "--scale", "paper")
    assert claim["seeds"] == 5
    assert claim["flops"] == pytest.approx(5 * sum(arm["flops"]["total"] for arm in claim["arms"].values()))
    done = cost(tmp_path, "sop-vs-nsp", "--scale", "paper", "--tflops", "100")
    for words in (*claim["arms"], "all runs", "hours a run"):
        assert words in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["model=bert_bsae"], "bert_bsae"),
        (["model.heads=5"], "heads"),
        (["bert_base"], "model=bert_base"),
        (["sop-vs-nsp", "--scale", "huge"], "huge"),
        (["sop-vs-nsp", "static-vs-dynamic-masking"], "one claim"),
        (["model=bert_tiny", "format.max_length=4096"], "max_length"),
        (["tokenizer=file", "tokenizer.path=nowhere.txt"], "nowhere.txt"),
        (["--tflops", "0"], "--tflops"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(tmp_path: Path, arguments: list[str], named: str) -> None:
    done = cost(tmp_path, *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert named in line
