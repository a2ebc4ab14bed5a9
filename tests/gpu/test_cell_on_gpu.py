"""A whole cell on a GPU: trained, interrupted and gone on with, measured, recorded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.conftest import make_cell, own_cache
from tests.gpu.gpuhelp import DEVICE, NEEDS_GPU

__all__ = ["make_cell", "own_cache"]

pytestmark = [pytest.mark.gpu, NEEDS_GPU]
MakeCell = Callable[..., Path]


class Killed(BaseException):
    """In place of a signal."""


def losses(directory: Path) -> list[float]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row["loss/mlm"] for row in rows]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cell_goes_on_where_it_was_interrupted(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    # Here, so that collecting it costs nothing where it is skipped.
    from clozelab.training import module
    from clozelab.training.cell import run_cell

    settings = ["task=mlm_sop", "trainer.checkpoint_every=5", f"trainer.precision={precision}"]
    whole, parts = make_cell("whole", *settings), make_cell("parts", *settings)
    expected = run_cell(whole)
    assert expected is not None
    step = module.PretrainingModule.training_step

    def dying(self: Any, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        if self.spent.steps == 8:
            raise Killed
        step(self, batch, batch_idx)

    with monkeypatch.context() as patched:
        patched.setattr(module.PretrainingModule, "training_step", dying)
        with pytest.raises(Killed):
            run_cell(parts)
    assert not (parts / "record.json").exists()
    record = run_cell(parts)
    assert record is not None
    assert record.status == "finished"
    assert record.budgets["steps"] == expected.budgets["steps"] == 12
    assert record.provenance["precision"] == precision
    if DEVICE.type == "cuda":
        assert record.provenance["gpu"]
    # Sums on a GPU may come in another order each time: near, and not the same bits.
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-2)
    assert record.metrics.keys() == expected.metrics.keys()
    for name, metric in expected.metrics.items():
        assert record.metrics[name].value == pytest.approx(metric.value, rel=5e-2, abs=5e-2), name
