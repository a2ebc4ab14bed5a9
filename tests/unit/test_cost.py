"""Parameters and FLOPs: the formula against what torch counts in a real pass."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from clozelab.models.encoder import EncoderOption
from clozelab.models.positions.learned import LearnedOption
from clozelab.models.pretraining import PretrainingModel
from clozelab.training.cost import flops, forward_flops, parameters

BASE_LIKE = EncoderOption(hidden=96, layers=4, heads=6, ffn=384, position=LearnedOption(length=64))
SHAPE = {"batch_size": 3, "length": 64, "vocab_size": 1000, "targets": 9}


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("change", [{}, {"embedding": 32, "share": "all"}, {"layers": 1}, {"tie_output": False}])
def test_the_formula_counts_what_torch_counts(change: dict[str, object], pair: bool) -> None:
    option = dataclasses.replace(BASE_LIKE, **change)  # type: ignore[arg-type]
    b, s, v, k = SHAPE.values()
    with torch.device("meta"):
        model = PretrainingModel(option, v, 0, pair=pair).eval()
        ids = torch.zeros(b, s, dtype=torch.long)
        positions_BQ = torch.zeros(b, k + pair, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            hidden_BQH = model.encoder(ids, ids, None, positions_BQ)
            assert model.mlm is not None
            model.mlm(hidden_BQH[:, int(pair) :].flatten(0, 1))
            if model.pair is not None:
                model.pair(hidden_BQH)
    expected = forward_flops(option, b, s, v, k, pair)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)
    assert flops(option, b, s, v, k, pair) == 3 * expected


def test_sharing_and_factorising_change_parameters_not_applications() -> None:
    plain = dataclasses.replace(BASE_LIKE, embedding=None)
    shared = dataclasses.replace(BASE_LIKE, share="all")
    assert flops(plain, **SHAPE) == flops(shared, **SHAPE)
    with torch.device("meta"):
        a, b = (parameters(PretrainingModel(option, 1000, 0)) for option in (plain, shared))
    assert a["unique"] == a["unshared"] == b["unshared"]
    block = 4 * 96 * 96 + 4 * 96 + 2 * 96 * 384 + 96 + 384 + 4 * 96
    assert a["unique"] - b["unique"] == 3 * block
    assert a["embedding"] == b["embedding"] == (1000 + 64 + 2) * 96
    assert a["non_embedding"] == a["unique"] - a["embedding"]
