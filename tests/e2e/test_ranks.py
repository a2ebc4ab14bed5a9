"""Two ranks train what one process trains: same loss, same gradients, one record, one tracked run."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clozelab.training.cell import run_cell


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_ranks_equal_one(make_cell: Callable[..., Path], accumulate: int) -> None:
    quiet = ["task=mlm_sop", "model.dropout=0", "model.attention_dropout=0", f"trainer.accumulate={accumulate}"]
    alone = make_cell("alone", *quiet)
    run_cell(alone)
    together = make_cell("together", *quiet, "trainer.devices=2", "tracker=wandb")
    command = [sys.executable, "-m", "clozelab.running.child", str(together)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = [
        [json.loads(line)["loss/mlm"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (alone, together)
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    weights = [
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for folder in (alone, together)
    ]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=1e-4)
    assert len(list(together.glob("wandb/offline-run-*"))) == 1
