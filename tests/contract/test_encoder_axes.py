"""Contracts that every setting of the encoder keeps together with every other; position schemes are found by discovery,
those of tomorrow too.

The full product {position} x {norm} x {placement} x {feed-forward} x {sharing}: finite, one step lowers the loss and
moves every parameter, every parameter has a gradient, padding changes nothing. What costs more (states, copies, ties,
DDP, gradients under padding, rows without tokens, document layouts), and the other axes, are covered pairwise: any two
settings of any two axes meet in some case (`pairwise`).
"""

import copy
import dataclasses
import io
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clozelab.models.attention import SelfAttention
from clozelab.models.encoder import SHARES, EncoderOption
from clozelab.models.initialise import initialise
from clozelab.models.layers import ACTIVATIONS, GATED, PLACES
from clozelab.models.norms import NORMS
from clozelab.models.position import PositionOption
from clozelab.models.pretraining import PretrainingModel
from clozelab.options import discover, registered

discover("clozelab.models")

V, S, PAD = 61, 7, 0
LONGEST = 9
LENGTHS = (7, 3, 5)
SCHEMES = sorted(registered("model/position"))
TOY: dict[str, Any] = {"hidden": 24, "layers": 2, "heads": 6, "ffn": 20, "embedding": 10, "init_scale": 0.2}

# Relative, of the loss; and of the gradient: 1 - cosine of all of it, and relative error of each parameter.
BF16_LOSS, BF16_COSINE, BF16_PARAMETER = 0.01, 0.002, 0.1


# --- toys -------------------------------------------------------------------------------------------------------------


def position(name: str, **settings: Any) -> PositionOption:
    """The option of a scheme; a table is just long enough."""
    cls = registered("model/position")[name]
    known = {field.name for field in dataclasses.fields(cls)}
    made: PositionOption = cls(**({"length": LONGEST} if "length" in known else {}), **settings)
    return made


def toy_option(**settings: Any) -> EncoderOption:
    return EncoderOption(**TOY | settings)


def toy(option: EncoderOption, pair: bool = True, seed: int = 0) -> PretrainingModel:
    model = PretrainingModel(option, V, PAD, pair=pair)
    initialise(model, seed)
    return model.eval()


def toy_batch(lengths: tuple[int, ...] = LENGTHS, length: int = S, other: int = 0) -> dict[str, Tensor]:
    """Rows of the given lengths, padded to `length`. With `other` the padding holds other ids and segments."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, V, (len(lengths), LONGEST), generator=generator)[:, :length]
    target_ids = torch.randint(1, V, (len(lengths), 3), generator=generator)
    mask = torch.arange(length) < torch.tensor(lengths)[:, None]
    place = torch.tensor([1, 2, 4]).expand(len(lengths), -1)
    used = place < torch.tensor(lengths)[:, None]
    segments = (torch.arange(length) >= 2).long().expand(len(lengths), -1)
    return {
        "input_ids": torch.where(mask, ids, (ids * other) % V),
        "segment_ids": torch.where(mask, segments, other % 2),
        "attention_mask": mask,
        "target_positions": place * used,
        "target_ids": torch.where(used, target_ids, -100),
        "pair_labels": torch.arange(len(lengths)) % 2,
    }


def total(model: PretrainingModel, batch: dict[str, Tensor]) -> Tensor:
    sums = model(batch)
    return sums.mlm_loss if sums.pair_loss is None else sums.mlm_loss + sums.pair_loss


def gradients(model: PretrainingModel, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, gradient of every parameter that has one)."""
    model.zero_grad(set_to_none=True)
    loss = total(model, batch)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@torch.no_grad()
def step(model: PretrainingModel, batch: dict[str, Tensor], gradient: dict[str, Tensor]) -> Tensor:
    """The loss after one step of gradient descent that should lower it by about 0.01."""
    rate = 0.01 / sum(float(g.square().sum()) for g in gradient.values())
    for name, parameter in model.named_parameters():
        parameter -= rate * gradient[name]
    return total(model, batch)


def uses(model: nn.Module) -> list[list[str]]:
    """Names of the parameters that are one: what is tied to what."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(names.values())


# --- the contracts ----------------------------------------------------------------------------------------------------


def check_padding(model: PretrainingModel) -> None:
    """Hidden states to 1e-5: more padding, other ids in it, unpadded or not, each sequence alone without any."""
    encoder, batch = model.encoder, toy_batch()
    real = batch["attention_mask"]

    def hidden(batch: dict[str, Tensor], unpad: bool) -> Tensor:
        encoder.unpad = unpad
        hidden_BSH: Tensor = encoder(batch["input_ids"], batch["segment_ids"], batch["attention_mask"])
        return hidden_BSH[:, :S][real]

    with torch.no_grad():
        expected = hidden(batch, False)
        assert bool(expected.isfinite().all())
        # The first row has no padding in any case.
        rows = list(zip(batch["input_ids"], batch["segment_ids"], LENGTHS, strict=True))[1:]
        forms = {
            "more and other padding": hidden(toy_batch(length=LONGEST, other=17), False),
            "unpadded": hidden(toy_batch(length=LONGEST, other=17), True),
            "alone": torch.cat(
                [
                    expected[: LENGTHS[0]],
                    *(encoder(ids[None, :n], segments[None, :n], None)[0] for ids, segments, n in rows),
                ]
            ),
        }
    for form, found in forms.items():
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=lambda m, f=form: f"{f}: {m}")


def check_state(model: PretrainingModel) -> None:
    """What is saved comes back in the same bits; what was tied is tied after it, and nothing else."""
    option = model.encoder.option
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = PretrainingModel(option, V, PAD, pair=True)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    same(loaded, model)
    tied = [["encoder.embeddings.token.weight", "mlm.weight"]] if option.tie_output else []
    assert [names for names in uses(loaded) if len(names) > 1] == tied
    # A shared block is one module, applied several times.
    for part, owners in (("attention", model.encoder.attention_of), ("ffn", model.encoder.ffn_of)):
        assert len(owners) == option.layers
        assert [n for n, block in enumerate(loaded.encoder.blocks) if hasattr(block, part)] == sorted(set(owners))


def same(model: PretrainingModel, other: PretrainingModel) -> None:
    """The same values under the same names, and the same names for one parameter."""
    assert uses(model) == uses(other)
    expected = other.state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def check_training(model: PretrainingModel) -> None:
    """Finite; every parameter has a gradient that is not zero; a step lowers the loss and moves every parameter.

    The model is trained by it.
    """
    batch = toy_batch()
    before, gradient = gradients(model, batch)
    assert bool(before.isfinite())
    for name, parameter in model.named_parameters():
        assert name in gradient, f"{name} has no gradient"
        assert gradient[name].shape == parameter.shape
        assert bool(gradient[name].isfinite().all()), f"the gradient of {name} is not finite"
        assert bool(gradient[name].any()), f"the gradient of {name} is zero"
    was = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert step(model, batch, gradient) < before
    assert all(not torch.equal(parameter, was[name]) for name, parameter in model.named_parameters())


def check_gradients(model: PretrainingModel) -> None:
    """Loss and gradients to 1e-5 of the largest: more and other padding, unpadded, and both ways of attention."""
    model.encoder.unpad = False
    loss, expected = gradients(model, toy_batch())
    largest = max(float(gradient.abs().max()) for gradient in expected.values())

    def compare(form: str, batch: dict[str, Tensor]) -> None:
        found_loss, found = gradients(model, batch)
        torch.testing.assert_close(found_loss, loss, rtol=1e-5, atol=1e-5, msg=lambda m: f"{form}: {m}")
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(
                gradient, expected[name], rtol=1e-4, atol=1e-5 * largest, msg=lambda m, n=name: f"{form}, {n}: {m}"
            )

    compare("more and other padding", toy_batch(length=LONGEST, other=17))
    model.encoder.unpad = True
    compare("unpadded", toy_batch(length=LONGEST, other=17))
    # A rate so small that it is rounded to none: attention goes the way that knows dropout, and drops nothing.
    with rates(model, 0.0, attention=1e-4):
        compare("the other way of attention", toy_batch())


def check_empty_rows(model: PretrainingModel) -> None:
    """A row that is all padding, or a batch of such, gives numbers and finite gradients on either way of attention."""
    for rate, bf16, unpad, lengths in (
        (0.0, False, False, (7, 0, 5)),
        (0.0, True, False, (7, 0, 5)),
        (0.1, False, False, (7, 0, 5)),
        (0.1, True, False, (7, 0, 5)),
        (0.0, False, True, (7, 0, 5)),
        (0.1, True, True, (7, 0, 5)),
        (0.1, False, None, (0, 0)),
    ):
        case = f"dropout={rate} bf16={bf16} unpad={unpad} lengths={lengths}"
        batch, model.encoder.unpad = toy_batch(lengths), unpad
        with rates(model, rate, rate), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            hidden = model.encoder(batch["input_ids"], batch["segment_ids"], batch["attention_mask"])
            loss, gradient = gradients(model, batch)
        assert bool(hidden.isfinite().all()), case
        assert bool(loss.isfinite()), case
        for name, g in gradient.items():
            assert bool(g.isfinite().all()), f"{case}: {name}"


@contextmanager
def rates(model: PretrainingModel, rate: float, attention: float) -> Iterator[None]:
    """The model in training with these rates of dropout."""
    for module in model.modules():
        if hasattr(module, "rate"):
            module.rate = attention if isinstance(module, SelfAttention) else rate
    try:
        yield model.train()
    finally:
        model.eval()


def check_reach(model: PretrainingModel) -> None:
    """As long a sequence as the scheme says; one longer is refused by name. Any length, where it says None."""
    encoder, longest = model.encoder, model.encoder.option.position.longest
    ids = torch.ones(1, longest or 150, dtype=torch.long)
    assert bool(encoder(ids, ids * 0, None).isfinite().all())
    if longest is not None:
        ids = torch.ones(1, longest + 1, dtype=torch.long)
        with pytest.raises(ValueError, match=rf"model\.position\.length >= {longest + 1}"):
            encoder(ids, ids * 0, None)


def check_layout(model: PretrainingModel) -> None:
    """Two sequences in one row, told apart by document_ids and counted by position_ids, read as each does alone, also
    with padding behind them, unpadded or not; and the places that are asked for come as they do among all."""
    encoder, batch = model.encoder, toy_batch((3, 4), 4)
    ids, segments = batch["input_ids"], batch["segment_ids"]
    asked = torch.tensor([[5, 0, 2]])

    def in_one_row(*parts: Tensor) -> Tensor:
        return torch.cat([parts[0][:3], parts[1], torch.tensor([1, 0])])[None]

    row, row_segments, place = (in_one_row(*x) for x in (ids, segments, torch.arange(4).expand(2, -1)))
    document, real = torch.tensor([[0] * 3 + [1] * 6]), torch.arange(9)[None] < 7
    with torch.no_grad():
        alone = torch.cat([encoder(ids[b : b + 1, :n], segments[b : b + 1, :n], None)[0] for b, n in ((0, 3), (1, 4))])
        for length, unpad in ((7, None), (9, False), (9, True)):
            encoder.unpad = unpad
            given = [x[:, :length] for x in (row, row_segments, real)]
            where = {"position_ids": place[:, :length], "document_ids": document[:, :length]}
            together = encoder(*given, **where)[0, :7]
            torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
            there = encoder(*given, asked, **where)[0]
            torch.testing.assert_close(there, alone[asked[0]], rtol=1e-5, atol=1e-5)
    encoder.unpad = None


def check_bf16(model: PretrainingModel) -> None:
    """Under autocast the loss is within BF16_LOSS of that in fp32, the gradient within the other two bounds."""
    batch = toy_batch()
    loss, expected = gradients(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        half_loss, found = gradients(model, batch)
    assert float((half_loss - loss).abs() / loss) < BF16_LOSS
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    one, two = (torch.cat([g[name].flatten() for name in expected]) for g in (found, expected))
    assert 1 - float(nn.functional.cosine_similarity(one, two, 0)) < BF16_COSINE
    for name, gradient in expected.items():
        # A parameter that hardly counts is held against a hundredth of the whole gradient.
        error = (found[name] - gradient).norm() / max(gradient.norm(), 0.01 * two.norm())
        assert error < BF16_PARAMETER, (name, error)


def check_copies(model: PretrainingModel) -> None:
    """A copy, what DistributedDataParallel holds, and what was loaded from its state (a process group must be there):
    the same parameters and ties before a step and after it. Inside DDP the gradients are the same.

    The model is trained by it.
    """
    batch, before = toy_batch(), uses(model)
    _, expected = gradients(model, batch)
    copied = copy.deepcopy(model)
    same(copied, model)
    identity = {name: id(parameter) for name, parameter in model.named_parameters()}
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert {name.removeprefix("module."): id(p) for name, p in wrapped.named_parameters()} == identity
    # Twice: the second pass finds out whether the first left a parameter without gradient.
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        sums = wrapped(batch)
        (sums.mlm_loss + sums.pair_loss).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected[name]), name
    loaded = PretrainingModel(model.encoder.option, V, PAD, pair=True).eval()
    loaded.load_state_dict({name.removeprefix("module."): value for name, value in wrapped.state_dict().items()})
    step(wrapped.module, batch, expected)
    assert not torch.equal(copied.pair.pooler.weight, model.pair.pooler.weight)
    for other in (copied, loaded):
        # Each by its own backward pass: what is tied in one and not in the other comes out different.
        step(other, batch, gradients(other, batch)[1])
        same(other, model)
    assert uses(model) == before


def check_all(option: EncoderOption) -> None:
    """Every contract; a process group must be there."""
    model = toy(option)
    for check in (
        check_padding,
        check_state,
        check_gradients,
        check_reach,
        check_layout,
        check_empty_rows,
    ):
        check(model)
    check_copies(model)
    check_training(toy(option))


# --- the full product -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_combination(scheme: str, norm: str, place: str, share: str, activation: str) -> None:
    model = toy(toy_option(position=position(scheme), norm=norm, norm_place=place, share=share, activation=activation))
    check_padding(model)
    check_training(model)


# --- pairwise ---------------------------------------------------------------------------------------------------------

Settings = dict[str, Any]
AXES: dict[str, list[Settings]] = {
    "position": [
        *({"position": position(name)} for name in SCHEMES),
    ],
    "norm": [{"norm": name} for name in NORMS],
    "place": [{"norm_place": name} for name in PLACES],
    "activation": [{"activation": name} for name in (*ACTIVATIONS, *GATED)],
    "share": [
        *({"share": name} for name in SHARES),
        {"share": "attention", "share_groups": 2, "layers": 4},
        {"share": "all", "share_inner": 2, "layers": 4},
        {"share": "ffn", "share_groups": 2, "share_inner": 2, "layers": 4},
    ],
    "heads": [{}, {"kv_heads": 2}, {"kv_heads": 1}],
    "window": [{}, {"window": 2, "global_every": 0}, {"window": 4, "global_every": 2}],
    "bias": [{"bias": True}, {"bias": False}],
    "segments": [{"segments": n} for n in (0, 1, 2)],
    "embedding": [{}, {"embedding": None}, {"embedding": None, "project": True}],
    "output": [{}, {"tie_output": False}, {"tie_output": False, "output": 8}],
    "embedding_norm": [{"embedding_norm": True}, {"embedding_norm": False}],
    "width": [{"gated_width": "matched"}, {"gated_width": "ffn"}],
    "ffn_dropout": [{"ffn_dropout": 0.0}, {"ffn_dropout": 0.1, "embedding_dropout": 0.2}],
    "init": [{"init": "truncated"}, {"init": "normal", "init_depth": True}],
}
# Settings that the axes above do not reach, and the published combination that uses most of them.
MODERN: Settings = {"norm_place": "pre", "first_norm": False, "bias": False, "activation": "geglu", "segments": 0}
MORE: list[Settings] = [
    {**MODERN, "position": position("rope", local_theta=10.0), "window": 2, "layers": 4},
    {**MODERN, "position": position("none"), "share": "ffn", "norm": "rmsnorm"},
    {"position": position("learned", offset=2), "layers": 1, "heads": 1, "window": 1, "global_every": 0},
    {"position": position("relative_key", keys=True), "layers": 1, "kv_heads": 3, "norm_place": "sandwich"},
    {"position": position("t5_bias", buckets=8, furthest=5), "share": "attention", "norm_place": "pre"},
    {"position": position("sinusoidal"), "embedding": 9, "heads": 8, "ffn": 1, "activation": "swiglu"},
]


def pairwise(axes: dict[str, list[Settings]]) -> list[dict[str, int]]:
    """Cases (axis -> number of the setting) in which any two settings of any two axes meet; greedy, always the same."""
    rng = random.Random(0)
    names = list(axes)
    missing = {
        ((one, i), (two, j))
        for one, two in itertools.combinations(names, 2)
        for i, j in itertools.product(range(len(axes[one])), range(len(axes[two])))
    }
    cases = []
    while missing:
        best: dict[str, int] = {}
        covered: set[Any] = set()
        for _ in range(5):
            # Begin with a pair that no case has; give each further axis the setting that meets most new ones.
            case = dict(rng.choice(sorted(missing)))
            for name in rng.sample(names, len(names)):
                if name not in case:
                    gains = [
                        sum(_pair(names, (name, i), other) in missing for other in case.items())
                        for i in range(len(axes[name]))
                    ]
                    case[name] = rng.choice([i for i, gain in enumerate(gains) if gain == max(gains)])
            new = missing & {_pair(names, one, two) for one, two in itertools.combinations(case.items(), 2)}
            if len(new) > len(covered):
                best, covered = case, new
        missing -= covered
        cases.append(best)
    return cases


def _pair(names: list[str], one: tuple[str, int], two: tuple[str, int]) -> tuple[tuple[str, int], tuple[str, int]]:
    return (one, two) if names.index(one[0]) < names.index(two[0]) else (two, one)


def _options() -> Iterator[Any]:
    chosen = [[AXES[axis][i] for axis, i in case.items()] for case in pairwise(AXES)]
    for settings in [*chosen, *([more] for more in MORE)]:
        merged: Settings = {key: value for part in settings for key, value in part.items()}
        option = toy_option(**merged)
        stated = [f"{key}={value}" for key, value in sorted(merged.items()) if key != "position"]
        yield pytest.param(option, id=" ".join([type(option.position).__name__, *stated]))


PAIRWISE = list(_options())


def test_any_two_settings_meet() -> None:
    cases = pairwise(AXES)
    for (one, ones), (two, twos) in itertools.combinations(AXES.items(), 2):
        assert {(case[one], case[two]) for case in cases} == set(itertools.product(range(len(ones)), range(len(twos))))


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One process that is a group."""
    file = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=file.as_uri(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("option", PAIRWISE)
@pytest.mark.usefixtures("process_group")
def test_pairwise(option: EncoderOption) -> None:
    check_all(option)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bf16_is_near_fp32(scheme: str, place: str, norm: str) -> None:
    check_bf16(toy(toy_option(position=position(scheme), norm_place=place, norm=norm)))
