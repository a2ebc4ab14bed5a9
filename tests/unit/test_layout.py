"""Unpadded and packed batches: the same values and gradients as one sequence at a time."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clozelab.models.encoder import Encoder, EncoderOption
from clozelab.models.initialise import initialise
from clozelab.models.layout import _first_fit, layout_of
from clozelab.models.position import PositionOption
from clozelab.models.positions.learned import LearnedOption
from clozelab.models.positions.rope import RopeOption
from clozelab.models.positions.t5_bias import T5BiasOption
from clozelab.models.pretraining import PretrainingModel

V, S = 61, 11
TOY = EncoderOption(hidden=24, layers=3, heads=3, ffn=19, embedding=10, init_scale=0.3, position=LearnedOption(S))
SCHEMES = [LearnedOption(S), RopeOption(), T5BiasOption(8, 6)]


def toy(option: EncoderOption = TOY) -> Encoder:
    encoder = option.build(V, 0)
    initialise(encoder, 0)
    return encoder.eval()


def ragged(lengths: list[int], width: int = S) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, segments, mask) of random sequences of these lengths, in a grid as wide."""
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(1, V, (len(lengths), width), generator=generator)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return torch.where(mask, ids, 0), (torch.arange(width) >= 3).long().expand(len(lengths), width).clone(), mask


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("position", SCHEMES)
def test_unpadded_is_padded(position: PositionOption, window: int | None) -> None:
    encoder = toy(dataclasses.replace(TOY, position=position, window=window, kv_heads=1))
    ids, segments, mask = ragged([4, S, 1, 7, 2, 2])
    mask[1, 5] = False  # a hole: the positions of the others stay
    places = torch.tensor([[0, 3], [10, 4], [0, 0], [6, 1], [1, 1], [0, 1]])
    results = []
    for unpad in (False, True):
        encoder.unpad = unpad
        encoder.zero_grad()
        everywhere, there = encoder(ids, segments, mask), encoder(ids, segments, mask, places)
        weights = torch.randn(there.shape, generator=torch.Generator().manual_seed(3))
        ((there * weights).mean() + everywhere[mask].square().mean()).backward()  # type: ignore[no-untyped-call]
        results.append([everywhere[mask], there, *(parameter.grad for parameter in encoder.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("position", SCHEMES)
def test_packed_documents_are_as_if_alone(position: PositionOption, unpad: bool) -> None:
    encoder = toy(dataclasses.replace(TOY, position=position))
    encoder.unpad = unpad
    ids, segments, mask = ragged([9, S])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 0, 0], [0] * 6 + [1] * 5])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 0, 0], [*range(6), *range(5)]])
    packed = encoder(ids, segments, mask, position_ids=positions, document_ids=documents)
    for row, first, last in ((0, 0, 3), (0, 3, 7), (0, 7, 9), (1, 0, 6), (1, 6, 11)):
        alone = encoder(ids[row : row + 1, first:last], segments[row : row + 1, first:last], None)
        torch.testing.assert_close(packed[row, first:last], alone[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pair", [False, True])
def test_losses_and_scores_of_unpadded_batches(pair: bool) -> None:
    ids, segments, mask = ragged([4, S, 2, 7])
    batch = {"input_ids": ids, "segment_ids": segments, "attention_mask": mask}
    batch["target_positions"] = torch.tensor([[1, 2, 0, 0], [3, 10, 5, 0], [0, 0, 0, 0], [6, 0, 0, 0]])
    batch["target_ids"] = torch.tensor([[5, 6, -100, -100], [7, -100, 8, -100], [-100] * 4, [9, -100, -100, -100]])
    batch["pair_labels"] = torch.tensor([0, 1, 1, 0])
    model = PretrainingModel(TOY, V, 0, pair=pair)
    initialise(model, 0)
    found = []
    for unpad in (False, True):
        model.encoder.unpad = unpad
        found.append((model.eval()(batch), model.scores(batch)))
    for a, b in zip(*found, strict=True):
        for x, y in zip(a, b, strict=True):
            assert (x is None) == (y is None)
            if x is not None and y is not None:
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_a_cpu_unpads_where_it_pays() -> None:
    ids, _, mask = ragged([2, 3, S])
    assert layout_of(ids, mask).unpadded is not None
    ids, _, mask = ragged([S - 1, S, S])
    assert layout_of(ids, mask).unpadded is None
    full = layout_of(ids, torch.ones_like(mask), unpad=True)
    assert full.unpadded is None
    assert full.mask_BS is None
    nothing = layout_of(ids, torch.zeros_like(mask), unpad=True)  # no token at all: there is nothing to pack
    assert nothing.unpadded is None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=20).filter(any))
def test_packing_loses_nothing_and_overlaps_nowhere(lengths: list[int]) -> None:
    row_of, start_of, rows = _first_fit(lengths, max(lengths))
    places = [
        (row, start + n) for row, start, length in zip(row_of, start_of, lengths, strict=True) for n in range(length)
    ]
    assert len(set(places)) == len(places) == sum(lengths)
    assert all(row < rows and place < max(lengths) for row, place in places)
    # No two rows could have been one: more than half of every row but one is in use.
    used = [sum(length for row, length in zip(row_of, lengths, strict=True) if row == n) for n in range(rows)]
    assert sum(2 * tokens <= max(lengths) for tokens in used) <= 1

    ids, _, mask = ragged(lengths, 9)
    layout = layout_of(ids, mask, unpad=True)
    if layout.unpadded is not None:
        flat, tokens = layout.flat(ids), sum(lengths)
        assert len(flat) % 64 == 0
        assert len(flat) - tokens < 64
        assert torch.equal(flat[:tokens], ids[mask])
        taken = layout.take(layout.spread(flat.float()[:, None]))[:, 0].long()
        assert torch.equal(taken[:tokens], ids[mask])
        assert not taken[tokens:].any()
        assert torch.equal(layout.positions()[:tokens], mask.nonzero()[:, 1])
        assert layout.document_BS is not None
        assert int((layout.document_BS >= 0).sum()) == sum(lengths)


@pytest.mark.parametrize("position", SCHEMES)
def test_a_causal_encoder_sees_what_comes_before_alone(position: PositionOption) -> None:
    model = PretrainingModel(dataclasses.replace(TOY, position=position), V, 0, causal=True)
    initialise(model, 0)
    encoder = model.eval().encoder
    ids, segments, mask = ragged([9, S, 4])
    other = ids.clone()
    other[:, 6:] = (ids[:, 6:] + 5) % V
    places = torch.tensor([[0, 5, 3]] * 3)
    for unpad in (False, True):
        encoder.unpad = unpad
        before, after = encoder(ids, segments, mask), encoder(other, segments, mask)
        torch.testing.assert_close(before[:2, :6], after[:2, :6], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(before[:2, 6:9], after[:2, 6:9])
        there = encoder(ids, segments, mask, places)
        torch.testing.assert_close(there[0], before[0, places[0]], rtol=1e-5, atol=1e-5)
    alone = encoder(ids[:1, :4], segments[:1, :4], None)
    torch.testing.assert_close(before[0, :4], alone[0], rtol=1e-5, atol=1e-5)
