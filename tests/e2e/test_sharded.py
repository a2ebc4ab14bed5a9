"""Ranks that part one model among them (`trainer.strategy=fsdp`) learn, keep and go on as others do."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from clozelab.running.export import export
from clozelab.training.cell import run_cell
from tests.e2e.test_many_devices import processes, run, start
from tests.e2e.test_resume_exact import cell, until
from tests.e2e.test_resume_formats import assert_same_bits, history, record_of, state

pytestmark = pytest.mark.slow

QUIET = ["model.dropout=0", "model.attention_dropout=0", "trainer.log_every=1"]
DDP = ["trainer.devices=2"]
FSDP = ["trainer.devices=2", "trainer.strategy=fsdp"]
# A cell that is asked for more than to run; its ranks replay the file.
SPOILT = """
import json, os, runpy, signal, sys
import clozelab.training.module as module
asked, step = os.environ["ASKED"], module.PretrainingModule.training_step

def training_step(self, batch, index):
    if str(self.spent.steps) == asked and self.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step(self, batch, index)
    if asked == "census":
        parameters = list(self.model.parameters())
        states = self.optimizers(use_pl_optimizer=False).state.values()
        moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
        held = [sum(tensor.to_local().numel() for tensor in tensors) for tensors in (parameters, moments)]
        with open(f"{sys.argv[1]}/held.{self.global_rank}", "w") as file:
            json.dump(held, file)

module.PretrainingModule.training_step = training_step
runpy.run_module("clozelab.running.child", run_name="__main__")
"""


def spoilt(directory: Path, asked: str) -> int:
    """Run a cell whose second rank dies at the beginning of a step, or whose ranks say what they hold (`census`)."""
    script = directory.parent / "spoilt.py"
    script.write_text(SPOILT)
    command, environment = [sys.executable, str(script), str(directory)], {**os.environ, "ASKED": asked}
    code = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=300).returncode
    until(lambda: not processes(directory), 60)
    return code


def change(directory: Path, **trainer: Any) -> None:
    """Give the frozen configuration of a cell other settings of its trainer."""
    config = yaml.safe_load((directory / "config.yaml").read_text())
    config["trainer"] |= trainer
    (directory / "config.yaml").write_text(yaml.safe_dump(config))


def close(one: Path, other: Path, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Two cells have the same curves to rounding, and checkpoints of one layout with the same values to rounding."""
    rows = history(one)
    for row, same in zip(rows, history(other), strict=True):
        assert row.keys() == same.keys()
        for key in row:
            exact = key.startswith("spent/") or key == "step"
            assert same[key] == (row[key] if exact else pytest.approx(row[key], rel=rtol, abs=atol)), key
    saved, like = state(one), state(other)
    assert saved["state_dict"].keys() == like["state_dict"].keys()
    torch.testing.assert_close(like["state_dict"], saved["state_dict"], rtol=rtol, atol=atol)
    (optimizer,), (its_like,) = saved["optimizer_states"], like["optimizer_states"]
    assert optimizer["param_groups"] == its_like["param_groups"]
    torch.testing.assert_close(its_like["state"], optimizer["state"], rtol=100 * rtol, atol=atol)


def shared_storages(directory: Path) -> int:
    """How many of the tensors of a checkpoint are another one's."""
    tensors = state(directory)["state_dict"].values()
    return len(tensors) - len({tensor.untyped_storage().data_ptr() for tensor in tensors})


@pytest.mark.parametrize(
    "case",
    [
        ["task=mlm_sop", "trainer.accumulate=2"],
        ["task=mlm_sop", "model=albert_tiny", "model.layers=3", "model.embedding=16", "trainer.precision=bf16"],
        [
            *("task=replaced_tokens", "task.pair=order", "format=sentence_pair", "trainer.accumulate=2"),
            *("evaluation=[heldout_replaced]", "budget.steps=4"),
        ],
        # A step that leaves a rank without targets.
        [
            *(
                "task=replaced_tokens",
                "task.tie=all",
                "task.generator_width=1",
                "task.generator_depth=1",
                "model.layers=2",
                "budget.steps=8",
                "batch_size=2",
            ),
            *("format=packed", "masking.count=bernoulli", "masking.rate=0.02", "evaluation=[heldout_replaced]"),
        ],
    ],
    ids=["bert, in pieces", "albert, bf16", "replaced tokens, order, in pieces", "replaced tokens, all shared"],
)
def test_sharded_equals_whole(tmp_path: Path, case: list[str]) -> None:
    kinds: dict[str, list[str]] = {"alone": [], "ddp": DDP, "fsdp": FSDP}
    alone, ddp, fsdp = (cell(tmp_path / name, [*QUIET, *case, *kind]) for name, kind in kinds.items())
    run_cell(alone)
    run(ddp)
    run(fsdp)
    if "batch_size=2" in case:
        spent = [0, *(row["spent/targets"] for row in history(fsdp))]
        assert min(b - a for a, b in itertools.pairwise(spent)) <= 1, "one step must leave a rank without targets"
    halves = "trainer.precision=bf16" in case  # parted batches are rounded otherwise
    close(ddp, fsdp)
    close(alone, fsdp, *((1e-2, 1e-3) if halves else ()))
    assert record_of(fsdp).cell == record_of(ddp).cell
    assert record_of(fsdp).metrics.keys() == record_of(ddp).metrics.keys()
    for name, metric in record_of(ddp).metrics.items():
        assert record_of(fsdp).metrics[name].value == pytest.approx(metric.value, rel=1e-3), name
    assert shared_storages(fsdp) == shared_storages(ddp) > 0
    assert export(fsdp, tmp_path / "exported") == 0


def test_a_rank_holds_its_share(tmp_path: Path) -> None:
    directory = cell(tmp_path / "cell", [*FSDP, "budget.steps=2"])
    assert spoilt(directory, "census") == 0
    held = [json.loads((directory / f"held.{rank}").read_text()) for rank in (0, 1)]
    whole = record_of(directory).parameters["unique"]
    assert [sum(of) for of in zip(*held, strict=True)] == [whole, 2 * whole]
    for parameters, moments in held:
        assert parameters == pytest.approx(whole / 2, rel=0.02)
        assert moments == 2 * parameters


def test_a_sharded_cell_that_was_stopped_is_one_that_was_not(tmp_path: Path) -> None:
    """By the death of a rank, and by SIGTERM to the first."""
    settings = ["task=mlm_sop", "budget.steps=60", "trainer.log_every=7", *FSDP]
    whole, parts = (cell(tmp_path / name, settings) for name in ("whole", "parts"))
    run(whole)
    assert spoilt(parts, "9") != 0
    assert not (parts / "record.json").exists()
    assert state(parts)["spent"]["steps"] == 8
    process = start(parts)
    until(lambda: len(history(parts)) >= 2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert not processes(parts)
    assert "failed" not in (parts / "train.log").read_text().partition("resuming")[2]
    stopped = state(parts)["spent"]["steps"]
    assert 14 <= stopped < 60
    run(parts)
    assert record_of(parts).provenance["resumed_at_step"] == stopped
    for key in ("state_dict", "optimizer_states"):
        assert_same_bits(state(whole)[key], state(parts)[key])
    assert history(whole) == history(parts)
    assert record_of(whole).metrics == record_of(parts).metrics


def test_either_strategy_goes_on_from_the_other(tmp_path: Path) -> None:
    settings = [*QUIET, "task=mlm_sop", "model=albert_tiny", "model.layers=2"]
    alone, parts = cell(tmp_path / "alone", settings), cell(tmp_path / "parts", [*settings, *FSDP])
    run_cell(alone)
    assert spoilt(parts, "6") != 0
    change(parts, strategy="ddp")
    assert spoilt(parts, "10") != 0
    assert state(parts)["spent"]["steps"] == 8
    change(parts, strategy="fsdp")
    run(parts)
    close(alone, parts)


def test_one_process_goes_on_from_shares(tmp_path: Path) -> None:
    settings = [*QUIET, "task=mlm_sop"]
    alone, parts = cell(tmp_path / "alone", settings), cell(tmp_path / "parts", [*settings, *FSDP])
    run_cell(alone)
    assert spoilt(parts, "6") != 0
    change(parts, strategy="ddp", devices=1)
    path = parts / "checkpoints" / "last.ckpt"
    saved = torch.load(path, weights_only=True)
    del saved["cell"]  # which another number of ranks makes another
    torch.save(saved, path)
    run_cell(parts)
    assert record_of(parts).provenance["resumed_at_step"] == 4
    close(alone, parts)


def test_a_sharded_cell_that_diverges_says_so(tmp_path: Path) -> None:
    directory = cell(tmp_path / "cell", [*FSDP, "optimizer.lr=1e30", "optimizer.clip=0", "schedule.warmup=0"])
    run(directory)
    assert record_of(directory).status == "diverged"
    assert not processes(directory)
