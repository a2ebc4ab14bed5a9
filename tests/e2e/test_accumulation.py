"""One batch in one piece or in several has one loss and one gradient: sums over the whole step, never means of means.

What it is held against is plain autograd over the whole batch at once. (Pitfalls F9 and F10: a mean over no target is
NaN, and a mean of means gives a micro-batch with few targets the weight of one with many.)
"""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from clozelab.data.batches import Batches
from clozelab.data.format import FormatOption
from clozelab.data.formats.full_sentences import FullSentences
from clozelab.data.formats.packed import Packed
from clozelab.data.formats.sentence_pair import SentencePair
from clozelab.data.loading import tensors
from clozelab.data.masking.causal import CausalTargets
from clozelab.data.masking.cloze import ClozeMasking
from clozelab.data.masking.selections.span import SpanSelection
from clozelab.data.replaced import ReplacedTask
from clozelab.data.store import Store
from clozelab.data.task import TaskOption
from clozelab.models.encoder import EncoderOption
from clozelab.models.initialise import initialise
from clozelab.models.positions.learned import LearnedOption
from clozelab.models.pretraining import PretrainingModel, PretrainingSums
from clozelab.training.budget import StepBudget
from clozelab.training.cell import make_trainer, run_cell
from clozelab.training.config import TrainerOption
from clozelab.training.metric_log import MetricLog
from clozelab.training.module import PretrainingModule
from clozelab.training.optimizers import AdamWOption, LinearOption
from tests.unit.datahelp import small_store

ROWS, S = 8, 48
ENCODER = EncoderOption(
    hidden=32, layers=2, heads=2, ffn=64, dropout=0.0, attention_dropout=0.0, position=LearnedOption(length=S)
)
TokenBatch = dict[str, Tensor]
CLOZE = TaskOption()
ORDER, NEXT = (TaskOption(pair=pair, pair_weight=0.5) for pair in ("order", "next"))


def replaced(pair: str = "none", **settings: Any) -> ReplacedTask:
    return ReplacedTask(pair=pair, pair_weight=0.5, weight=20.0, **{"generator_width": 0.5, **settings})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return small_store(tmp_path_factory.mktemp("store"))


@dataclasses.dataclass
class Watched(AdamWOption):
    """AdamW that remembers the gradients it was given."""

    def step(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> Tensor:
        self.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return super().step(optimizer, model)


@dataclasses.dataclass
class Case:
    """A batch and the model that learns from it."""

    batch: TokenBatch
    task: TaskOption
    causal: bool = False

    def model(self, store: Store) -> PretrainingModel:
        tokenizer = store.tokenizer
        model = self.task.build(ENCODER, tokenizer.vocab_size, 0, self.causal, tokenizer.special_ids)
        initialise(model, 3)
        if model.replaced is not None:
            # Initial values are so small that all tokens are told alike, and a mean of means would not show.
            with torch.no_grad():
                for n, parameter in enumerate(model.parameters()):
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(n)))
        return model


def case_of(store: Store, form: FormatOption, masking: Any, task: TaskOption = CLOZE) -> Case:
    examples = form.examples(store, "train")
    made = Batches(store, examples, form, task.objective, masking, 2, ROWS, sampled=task.samples)
    return Case(tensors(made.batch(5)), task, masking.causal)


def without_targets(case: Case, *rows: int) -> Case:
    """The case with no target in some rows."""
    batch = {key: value.clone() for key, value in case.batch.items()}
    batch["target_ids"][list(rows)], batch["target_positions"][list(rows)] = -100, 0
    return dataclasses.replace(case, batch=batch)


BERNOULLI = ClozeMasking(count="bernoulli", rate=0.2)
CASES: dict[str, Callable[[Store], Case]] = {
    "mlm": lambda store: case_of(store, SentencePair(S), ClozeMasking()),
    "mlm and order": lambda store: case_of(store, SentencePair(S), ClozeMasking(), ORDER),
    "mlm and next, bernoulli": lambda store: case_of(store, SentencePair(S), BERNOULLI, NEXT),
    "causal": lambda store: case_of(store, FullSentences(S), CausalTargets()),
    "packed spans": lambda store: case_of(store, Packed(S), ClozeMasking(selection=SpanSelection())),
    "packed causal": lambda store: case_of(store, Packed(S), CausalTargets()),
    "packed bernoulli": lambda store: case_of(store, Packed(S), BERNOULLI),
    "some rows without targets": lambda store: without_targets(
        case_of(store, SentencePair(S), BERNOULLI, ORDER), 0, 1, 3, 6
    ),
    "one row with targets": lambda store: without_targets(case_of(store, Packed(S), BERNOULLI), *range(7)),
    "replaced": lambda store: case_of(store, SentencePair(S), ClozeMasking(), replaced()),
    "replaced and order, bernoulli": lambda store: case_of(store, SentencePair(S), BERNOULLI, replaced("order")),
    "replaced and next, one encoder": lambda store: case_of(
        store, SentencePair(S), BERNOULLI, replaced("next", tie="all", generator_width=1.0)
    ),
    "replaced, packed spans": lambda store: case_of(
        store, Packed(S), ClozeMasking(selection=SpanSelection()), replaced(tie="none", temperature=2.0)
    ),
    "replaced and order, some rows without targets": lambda store: without_targets(
        case_of(store, SentencePair(S), BERNOULLI, replaced("order")), 0, 1, 3, 6
    ),
    "replaced, one row with targets": lambda store: without_targets(
        case_of(store, Packed(S), BERNOULLI, replaced()), *range(7)
    ),
}


@dataclasses.dataclass
class Stepped:
    """What one optimiser step left."""

    gradients: dict[str, Tensor]
    row: dict[str, float]
    model: PretrainingModel


def step(store: Store, case: Case, accumulate: int, folder: Path) -> Stepped:
    """Train one step as a cell does."""
    folder.mkdir()
    model, optimizer = case.model(store), Watched(lr=1e-2)
    module = PretrainingModule(
        model=model,
        optimizer=optimizer,
        schedule=LinearOption(warmup=0.0),
        budget=StepBudget(steps=1),
        weights=case.task.weights,
        seed=0,
        accumulate=accumulate,
        log_every=1,
        flops_of=lambda step: 1.0,
        precision="fp32",
        device=torch.device("cpu"),
    )
    option = TrainerOption(precision="fp32", accumulate=accumulate, threads=1, progress=False)
    trainer = make_trainer(folder, option, torch.device("cpu"), [MetricLog(folder)])
    trainer.fit(module, train_dataloaders=DataLoader([case.batch], batch_size=None))  # type: ignore[arg-type]
    (row,) = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Stepped(optimizer.gradients, row, model)


def parts(sums: PretrainingSums, batch: TokenBatch) -> dict[str, Tensor]:
    """Each part of the loss that the model has, as its mean over the batch; 0 over nothing."""
    numbers = {
        "mlm": (batch["target_ids"] != -100).sum(),
        "pair": len(batch["pair_labels"]),
        "replaced": batch["attention_mask"].sum(),
    }
    found = {part: getattr(sums, f"{part}_loss") for part in numbers}
    return {part: loss / max(numbers[part], 1) for part, loss in found.items() if loss is not None}


def plain(store: Store, case: Case) -> tuple[dict[str, Tensor], dict[str, float]]:
    """(gradients, parts of the loss) of the equation, the whole batch at once."""
    model, weights = case.model(store), case.task.weights
    losses = parts(model(case.batch), case.batch)
    torch.stack([weights[part] * loss for part, loss in losses.items()]).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, {part: loss.item() for part, loss in losses.items()}


def mean_of_means(store: Store, case: Case, pieces: int) -> dict[str, float]:
    """What the parts of the loss would be as means of the micro-batches' means."""
    model, means = case.model(store), []
    chunks = {key: value.chunk(pieces) for key, value in case.batch.items()}
    for i in range(pieces):
        micro = {key: value[i] for key, value in chunks.items()}
        means.append(parts(model(micro), micro))
    return {part: float(np.mean([mean[part].item() for mean in means])) for part in means[0]}


@pytest.mark.parametrize("name", CASES)
def test_pieces_of_a_batch_add_up_to_it(store: Store, tmp_path: Path, name: str) -> None:
    case = CASES[name](store)
    targets_B, nonpad_B = (case.batch["target_ids"] != -100).sum(1), case.batch["attention_mask"].sum(1)
    want, losses = plain(store, case)
    told = {"mlm": True, "pair": case.task.has_pair, "replaced": case.task.samples}
    assert losses.keys() == {part for part, has in told.items() if has}
    assert len(torch.unique(targets_B)) > 1, "the rows must differ for a mean of means to show"
    means = mean_of_means(store, case, ROWS)
    assert abs(means["mlm"] - losses["mlm"]) > 1e-4
    if "replaced" in losses:
        assert len(torch.unique(nonpad_B)) > 1
        assert abs(means["replaced"] - losses["replaced"]) > 1e-4
    for accumulate in (1, 2, 4, 8):
        got = step(store, case, accumulate, tmp_path / str(accumulate))
        assert got.gradients.keys() == want.keys()
        for key, gradient in want.items():
            torch.testing.assert_close(got.gradients[key], gradient, rtol=1e-5, atol=1e-6, msg=key)
        assert {key for key in got.row if key.startswith("loss/")} == {f"loss/{part}" for part in losses}
        for part, loss in losses.items():
            assert got.row[f"loss/{part}"] == pytest.approx(loss, abs=1e-5), part
        assert got.row["spent/targets"] == int(targets_B.sum())
        assert got.row["spent/nonpad_tokens"] == int(nonpad_B.sum())


RARE = ClozeMasking(count="bernoulli", rate=1e-9)


@pytest.mark.parametrize("form", [SentencePair(S), FullSentences(S), Packed(S)], ids=str)
@pytest.mark.parametrize("slots", [0, 5])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_step_without_a_target(store: Store, tmp_path: Path, form: FormatOption, slots: int, accumulate: int) -> None:
    if slots:
        case = without_targets(case_of(store, form, ClozeMasking()), *range(ROWS))
        assert case.batch["target_ids"].shape[1] >= slots
    else:
        case = case_of(store, form, RARE)
    assert not (case.batch["target_ids"] != -100).any()
    got = step(store, case, accumulate, tmp_path / "cell")
    assert got.gradients.keys() == {name for name, _ in got.model.named_parameters()}
    assert not any(gradient.any() for gradient in got.gradients.values())
    assert all(parameter.isfinite().all() for parameter in got.model.parameters())
    assert got.row["loss/mlm"] == got.row["accuracy/mlm"] == got.row["gradient_norm"] == got.row["spent/targets"] == 0


def test_pairs_are_learnt_where_no_word_is_hidden(store: Store, tmp_path: Path) -> None:
    case = case_of(store, SentencePair(S), RARE, ORDER)
    got = step(store, case, 4, tmp_path / "cell")
    assert got.row["loss/mlm"] == 0
    assert got.row["loss/pair"] == pytest.approx(math.log(2), abs=0.1)
    assert all(gradient.isfinite().all() for gradient in got.gradients.values())
    assert got.gradients["encoder.embeddings.token.weight"].any()


@pytest.mark.parametrize("pair", ["none", "order"])
@pytest.mark.parametrize("tie", ["none", "embeddings"])
@pytest.mark.parametrize("accumulate", [1, 2, 8])
def test_every_token_is_told_where_none_is_hidden(
    store: Store, tmp_path: Path, pair: str, tie: str, accumulate: int
) -> None:
    case = case_of(store, SentencePair(S), RARE, replaced(pair, tie=tie))
    assert not (case.batch["target_ids"] != -100).any()
    want, losses = plain(store, case)
    got = step(store, case, accumulate, tmp_path / "cell")
    assert got.row["loss/mlm"] == got.row["accuracy/mlm"] == got.row["spent/targets"] == 0
    for part in ("replaced", *(["pair"] if pair == "order" else [])):
        assert got.row[f"loss/{part}"] == pytest.approx(losses[part], abs=1e-5)
    assert losses["replaced"] > 0.1
    # Nothing was replaced: the loss is that of a model which is told so of every token, by the discriminator alone.
    model = case.model(store)
    alone = PretrainingModel.losses(model, {**case.batch, "replaced": torch.zeros_like(case.batch["attention_mask"])})
    assert alone.replaced is not None
    assert losses["replaced"] == pytest.approx(alone.replaced.loss[alone.replaced.loss > 0].mean().item(), abs=1e-5)
    assert got.gradients.keys() == {name for name, _ in got.model.named_parameters()}
    for key, gradient in got.gradients.items():
        if key in want:
            torch.testing.assert_close(gradient, want[key], rtol=1e-5, atol=1e-6, msg=key)
        if key.startswith("generator."):
            assert not gradient.any(), key
    assert got.gradients["encoder.embeddings.token.weight"].any()
    assert all(parameter.isfinite().all() for parameter in got.model.parameters())


def test_a_cell_whose_steps_have_hardly_a_target(make_cell: Callable[..., Path]) -> None:
    rare = ["masking.count=bernoulli", "masking.rate=0.004", "batch_size=2", "trainer.log_every=1"]
    directory = make_cell("rare", "task=mlm", *rare, "trainer.accumulate=2", "evaluation.heldout_mlm.rate=0.15")
    record = run_cell(directory)
    assert record is not None
    assert record.status == "finished"
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    seen = np.diff([0, *(row["spent/targets"] for row in rows)])
    assert len(rows) == 12
    assert 0 < np.count_nonzero(seen) < 12
    assert all(
        (row["loss/mlm"] > 0) == (n > 0) and math.isfinite(row["loss/mlm"]) for row, n in zip(rows, seen, strict=True)
    )
    assert all(metric.value is not None and math.isfinite(metric.value) for metric in record.metrics.values())
