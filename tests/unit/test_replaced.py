"""Replaced-token detection: what is put in and told, what is shared between the two encoders, what it costs."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from clozelab.data.masking.causal import CausalTargets
from clozelab.data.masking.cloze import ClozeMasking
from clozelab.data.replaced import ReplacedTask
from clozelab.data.task import TaskOption
from clozelab.models.encoder import EncoderOption
from clozelab.models.initialise import initialise
from clozelab.models.positions.learned import LearnedOption
from clozelab.models.positions.rope import RopeOption
from clozelab.models.replaced import ReplacedTokenModel
from clozelab.training.cost import flops, forward_parts, parameters
from clozelab.training.memory import kept_bytes, memory

V, S, B, K = 60, 16, 12, 4
SPECIAL = (0, 1, 2, 3, V - 1)
TOY = EncoderOption(
    hidden=32, layers=2, heads=4, ffn=48, embedding=20, position=LearnedOption(S), dropout=0.0, attention_dropout=0.0
)


def model_of(option: EncoderOption = TOY, **task: Any) -> ReplacedTokenModel:
    made = ReplacedTask(**task).build(option, V, 0, special_ids=SPECIAL)
    assert isinstance(made, ReplacedTokenModel)
    initialise(made, 3)
    with torch.no_grad():  # initial values are so small that every token is as likely as every other
        for parameter in made.parameters():
            parameter.add_(
                0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    return made.eval()


def batch_of(rows: int = B, padded: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    mask = torch.ones(rows, S, dtype=torch.bool)
    if padded:
        mask[1, 10:] = mask[2, 6:] = False
    ids = torch.where(mask, torch.randint(4, V - 1, (rows, S), generator=generator), 0)
    place = torch.stack([torch.randperm(5, generator=generator)[:K].sort()[0] + 1 for _ in range(rows)])
    target = ids.gather(1, place)
    target[0, 2:] = -100
    place[0, 2:] = 0
    hidden = ids.scatter(1, place, torch.where(target >= 0, V - 1, ids.gather(1, place)))
    return {
        "input_ids": hidden,
        "segment_ids": torch.zeros_like(ids),
        "attention_mask": mask,
        "target_positions": place,
        "target_ids": target,
        "target_draws": torch.rand(rows, K, generator=generator),
        "pair_labels": torch.arange(rows) % 2,
        "example_ids": torch.arange(rows),
        "text": ids,
    }


@pytest.mark.parametrize("unpad", [False, True])
def test_what_is_put_in_stands_at_targets_alone_and_is_no_special_token(unpad: bool) -> None:
    model, batch = model_of(), batch_of()
    model.encoder.unpad = model.generator.encoder.unpad = unpad
    ids_BS, replaced_BS, _ = model.fill(batch)
    is_target = torch.zeros(B, S, dtype=torch.bool)
    for b in range(B):
        is_target[b, batch["target_positions"][b][batch["target_ids"][b] >= 0]] = True
    assert torch.equal(ids_BS[~is_target], batch["text"][~is_target])
    assert torch.equal(replaced_BS, ids_BS != batch["text"])
    assert replaced_BS.any()
    assert not (is_target & replaced_BS).logical_xor(replaced_BS).any()
    assert not torch.isin(ids_BS[is_target], torch.tensor(SPECIAL)).any()


def test_tokens_are_drawn_from_the_generators_distribution() -> None:
    """Chi-square of 20,000 draws of one place, at temperature 1 and at 2."""
    for temperature in (1.0, 2.0):
        model, batch = model_of(temperature=temperature), batch_of()
        one = {key: value[:1] for key, value in batch.items()} | {
            "target_positions": torch.tensor([[3]]),
            "target_ids": batch["text"][:1, 3:4],
        }
        n = 20_000
        many = {key: value.expand(n, *value.shape[1:]) for key, value in one.items()}
        many["target_draws"] = torch.rand(n, 1, generator=torch.Generator().manual_seed(1))
        ids_BS, _, _ = model.fill(many)
        assert model.generator.mlm is not None
        hidden = model.generator.encoder(one["input_ids"], one["segment_ids"], one["attention_mask"])[0, 3]
        logits_V = model.generator.mlm(hidden).detach() / temperature
        logits_V[list(SPECIAL)] = -torch.inf
        expected = (logits_V.softmax(0) * n).double().numpy()
        found = np.bincount(ids_BS[:, 3].numpy(), minlength=V).astype(float)
        assert found[list(SPECIAL)].sum() == 0
        often = expected >= 5
        assert often.sum() > 10
        observed, wanted = (np.append(x[often], x[~often].sum()) for x in (found, expected))
        keep = wanted > 0
        assert scipy.stats.chisquare(observed[keep], wanted[keep] * observed.sum() / wanted.sum()).pvalue > 0.001


def test_the_largest_draw_still_gives_a_token_that_can_be() -> None:
    model, batch = model_of(), batch_of()
    batch["target_draws"] = torch.full((B, K), 1 - 2.0**-24)
    ids_BS, _, _ = model.fill(batch)
    assert not torch.isin(ids_BS[batch["text"] != ids_BS], torch.tensor(SPECIAL)).any()


def test_the_discriminator_learns_nothing_through_the_draw_and_both_learn_through_shared_embeddings() -> None:
    model, batch = model_of(), batch_of()
    own = [(name, p) for name, p in model.named_parameters() if name.startswith("generator.")]
    assert own
    sums = model(batch)
    assert sums.replaced_loss is not None
    gradients = torch.autograd.grad(sums.replaced_loss, [p for _, p in own], allow_unused=True, retain_graph=True)
    assert all(gradient is None for gradient in gradients)
    token = model.encoder.embeddings.token.weight
    for loss in (sums.replaced_loss, sums.mlm_loss):
        (gradient,) = torch.autograd.grad(loss, [token], retain_graph=True)
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize(
    ("tie", "shared"),
    [
        ("none", set()),
        ("embeddings", {"token.weight", "segment.weight", "norm.weight", "norm.bias", "position.table.weight"}),
    ],
)
def test_what_is_tied_is_one_parameter(tie: str, shared: set[str]) -> None:
    model = model_of(tie=tie)
    ours = dict(model.encoder.embeddings.named_parameters())
    theirs = dict(model.generator.encoder.embeddings.named_parameters())
    found = {name for name in theirs if any(theirs[name] is parameter for parameter in ours.values())}
    assert {name.split(".")[0] for name in found} == {name.split(".")[0] for name in shared}
    assert model.generator.mlm is not None
    assert model.generator.mlm.weight is model.generator.encoder.embeddings.token.weight


def test_one_encoder_in_both_roles() -> None:
    whole = dataclasses.replace(TOY, embedding=None)
    model = model_of(whole, tie="all", generator_width=1.0)
    assert model.generator.encoder is model.encoder
    assert all(not name.startswith("generator.encoder") for name, _ in model.named_parameters())


def test_positions_that_are_not_embedded_stay_with_their_heads() -> None:
    model = model_of(dataclasses.replace(TOY, position=RopeOption()))
    assert model.generator.encoder.embeddings.position is not model.encoder.embeddings.position
    assert model.generator.encoder.embeddings.token is model.encoder.embeddings.token


def test_an_arm_of_masked_words_and_one_of_replaced_tokens_begin_with_one_trunk() -> None:
    masked = TaskOption().build(TOY, V, 0)
    told = ReplacedTask().build(TOY, V, 0)
    for model in (masked, told):
        initialise(model, 7)
    theirs = dict(told.named_parameters())
    common = [name for name, _ in masked.named_parameters() if name in theirs]
    assert [name for name, _ in masked.encoder.named_parameters(prefix="encoder")] == common
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in masked.named_parameters() if name in common)


@pytest.mark.parametrize(
    ("heads", "width", "depth", "wanted"), [(4, 0.25, 1.0, (8, 1, 12, 2)), (4, 0.6, 0.5, (16, 2, 29, 1))]
)
def test_the_generator_is_a_share_of_the_model_in_whole_heads(
    heads: int, width: float, depth: float, wanted: tuple[int, ...]
) -> None:
    option = dataclasses.replace(TOY, heads=heads)
    made = ReplacedTask(generator_width=width, generator_depth=depth).generator(option)
    assert (made.hidden, made.heads, made.ffn, made.layers) == wanted
    assert made.embedding_size == TOY.embedding_size


def test_electra_small_has_the_generator_of_the_paper() -> None:
    """Table 6 and the published configurations: 256 wide with embeddings of 128, a generator 64 wide."""
    small = EncoderOption(hidden=256, layers=12, heads=4, ffn=1024, embedding=128)
    made = ReplacedTask().generator(small)
    assert (made.hidden, made.layers, made.heads, made.ffn, made.embedding_size) == (64, 12, 1, 256, 128)
    with torch.device("meta"):
        model = ReplacedTask().build(small, 30522, 0)
    # The discriminator of google/electra-small-discriminator with its head, as Hugging Face counts it.
    own = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("generator."))
    assert own == 13_549_057


@pytest.mark.parametrize("parts", [2, 4, 12])
def test_the_draw_does_not_depend_on_how_a_batch_is_parted(parts: int) -> None:
    model, batch = model_of(pair=("order")), batch_of()
    whole_ids, whole_replaced, _ = model.fill(batch)
    whole = model(batch)
    pieces = [{key: value.chunk(parts)[n] for key, value in batch.items()} for n in range(parts)]
    filled = [model.fill(piece) for piece in pieces]
    assert torch.equal(torch.cat([ids for ids, _, _ in filled]), whole_ids)
    assert torch.equal(torch.cat([replaced for _, replaced, _ in filled]), whole_replaced)
    sums = [model(piece) for piece in pieces]
    for name in whole._fields:
        total = sum(getattr(one, name) for one in sums)
        torch.testing.assert_close(total, getattr(whole, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("unpad", [False, True])
def test_scores_are_the_sums_one_by_one(unpad: bool) -> None:
    model, batch = model_of(pair="order"), batch_of()
    model.encoder.unpad = model.generator.encoder.unpad = unpad
    sums, scores = model(batch), model.scores(batch)
    assert sums.replaced_loss is not None
    torch.testing.assert_close(scores.replaced_loss_B.sum(), sums.replaced_loss, rtol=1e-5, atol=1e-5)
    assert scores.replaced_hits_B2.sum() == sums.replaced_correct
    assert scores.replaced_of_B2.sum() == sums.replaced_tokens == batch["attention_mask"].sum()
    _, replaced_BS, _ = model.fill(batch)
    assert torch.equal(scores.replaced_of_B2[:, 1], replaced_BS.sum(1).float())
    assert (scores.replaced_hits_B2 <= scores.replaced_of_B2).all()
    torch.testing.assert_close(scores.mlm_loss_BK.sum(), sums.mlm_loss)
    torch.testing.assert_close(scores.pair_loss_B.sum(), sums.pair_loss)


@pytest.mark.parametrize("unpad", [False, True])
def test_a_batch_without_targets_and_a_row_of_padding(unpad: bool) -> None:
    model, batch = model_of(), batch_of()
    model.encoder.unpad = model.generator.encoder.unpad = unpad
    batch["target_ids"] = torch.full_like(batch["target_ids"], -100)
    batch["input_ids"] = batch["text"].clone()
    batch["attention_mask"][3] = False
    sums = model(batch)
    assert sums.mlm_loss == 0
    assert sums.replaced_tokens == batch["attention_mask"].sum()
    (sums.mlm_loss + sums.replaced_loss).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_a_step_costs_what_torch_counts() -> None:
    option = dataclasses.replace(TOY, embedding=None)
    generator = ReplacedTask().generator(option)
    with torch.device("meta"):
        model = ReplacedTask(pair="order").build(option, V, 0)
    batch = {key: value.to("meta") for key, value in batch_of(padded=False).items()}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        sums = model(batch)
        (sums.mlm_loss + sums.replaced_loss + sums.pair_loss).backward()
    # Drawing runs the generator's head once more, forward alone.
    parts = forward_parts(option, B, S, V, K, True, generator)
    counted = flops(option, B, S, V, K, True, generator) + parts["generator_mlm_head"]
    # The pair head reads one place, which is told of as a token anyway.
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("option", [TOY, dataclasses.replace(TOY, share="all", layers=4)], ids=["bert", "albert"])
def test_shared_embeddings_are_counted_once_and_both_stacks_apply_their_layers(option: EncoderOption) -> None:
    with torch.device("meta"):
        model = ReplacedTask().build(option, V, 0)
        apart = ReplacedTask(tie="none").build(option, V, 0)
        unshared = ReplacedTask().build(dataclasses.replace(option, share="none"), V, 0)
    counts = parameters(model)
    assert counts["unique"] == sum(p.numel() for p in model.parameters())
    assert parameters(apart)["unique"] - counts["unique"] == counts["embedding"] + 2 * option.embedding_size
    assert counts["applied"] == parameters(unshared)["unique"]


def test_memory_is_what_a_step_keeps() -> None:
    option = dataclasses.replace(TOY, hidden=64, dropout=0.1, attention_dropout=0.1)
    task = ReplacedTask(generator_width=0.5)
    model = task.build(option, V, 0)
    initialise(model, 0)
    batch = batch_of(padded=False)
    batch["target_ids"] = batch["text"].gather(1, batch["target_positions"])
    estimate = memory(option, B, S, V, K, False, "cpu", "fp32", task.generator(option))
    assert estimate["weights"] == 4 * sum(p.numel() for p in model.parameters())
    assert estimate["activations"] == pytest.approx(kept_bytes(lambda: model.train()(batch), model), rel=0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight": -1}, r"task\.weight is -1"),
        ({"generator_width": 0}, r"task\.generator_width is 0"),
        ({"generator_depth": 1.5}, r"task\.generator_depth is 1\.5"),
        ({"temperature": 0}, r"task\.temperature is 0"),
        ({"tie": "heads"}, r"task\.tie is heads; give one of none, embeddings, all"),
        ({"tie": "all"}, r"task\.tie=all .* needs task\.generator_width=1"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplacedTask(**settings)


def test_maskings_that_leave_nothing_to_fill_are_refused() -> None:
    with pytest.raises(ValueError, match=r"masking=causal masks none; choose masking=dynamic"):
        ReplacedTask().check(CausalTargets())
    with pytest.raises(ValueError, match=r"masking\.predicted is 0\.5: task=replaced"):
        ReplacedTask().check(ClozeMasking(predicted=0.5))
