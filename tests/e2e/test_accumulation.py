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
from clozelab.data.pairs import pair_objective
from clozelab.data.store import Store
from clozelab.models.encoder import EncoderOption
from clozelab.models.initialise import initialise
from clozelab.models.positions.learned import LearnedOption
from clozelab.models.pretraining import PretrainingModel
from clozelab.training.budget import StepBudget
from clozelab.training.cell import make_trainer, run_cell
from clozelab.training.config import TrainerOption
from clozelab.training.metric_log import MetricLog
from clozelab.training.module import PretrainingModule
from clozelab.training.optimizers import AdamWOption, LinearOption
from tests.unit.datahelp import small_store

ROWS, S, PAIR_WEIGHT = 8, 48, 0.5
ENCODER = EncoderOption(
    hidden=32, layers=2, heads=2, ffn=64, dropout=0.0, attention_dropout=0.0, position=LearnedOption(length=S)
)
TokenBatch = dict[str, Tensor]


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
    pair: bool = False
    causal: bool = False

    def model(self, store: Store) -> PretrainingModel:
        model = PretrainingModel(ENCODER, store.tokenizer.vocab_size, 0, pair=self.pair, causal=self.causal)
        initialise(model, 3)
        return model


def batch_of(store: Store, form: FormatOption, masking: Any, pair: str = "none") -> TokenBatch:
    made = Batches(store, form.examples(store, "train"), form, pair_objective(pair), masking, 2, ROWS)
    return tensors(made.batch(5))


def without_targets(batch: TokenBatch, *rows: int) -> TokenBatch:
    """The batch with no target in some rows."""
    batch = {key: value.clone() for key, value in batch.items()}
    batch["target_ids"][list(rows)], batch["target_positions"][list(rows)] = -100, 0
    return batch


BERNOULLI = ClozeMasking(count="bernoulli", rate=0.2)
CASES: dict[str, Callable[[Store], Case]] = {
    "mlm": lambda store: Case(batch_of(store, SentencePair(S), ClozeMasking())),
    "mlm and order": lambda store: Case(batch_of(store, SentencePair(S), ClozeMasking(), "order"), pair=True),
    "mlm and next, bernoulli": lambda store: Case(batch_of(store, SentencePair(S), BERNOULLI, "next"), pair=True),
    "causal": lambda store: Case(batch_of(store, FullSentences(S), CausalTargets()), causal=True),
    "packed spans": lambda store: Case(batch_of(store, Packed(S), ClozeMasking(selection=SpanSelection()))),
    "packed causal": lambda store: Case(batch_of(store, Packed(S), CausalTargets()), causal=True),
    "packed bernoulli": lambda store: Case(batch_of(store, Packed(S), BERNOULLI)),
    "some rows without targets": lambda store: Case(
        without_targets(batch_of(store, SentencePair(S), BERNOULLI, "order"), 0, 1, 3, 6), pair=True
    ),
    "one row with targets": lambda store: Case(without_targets(batch_of(store, Packed(S), BERNOULLI), *range(7))),
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
        pair_weight=PAIR_WEIGHT,
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


def plain(store: Store, case: Case) -> tuple[dict[str, Tensor], float, float | None]:
    """(gradients, token loss, pair loss) of the equation, the whole batch at once."""
    model = case.model(store)
    sums = model(case.batch)
    token = sums.mlm_loss / (case.batch["target_ids"] != -100).sum()
    pair = None if sums.pair_loss is None else sums.pair_loss / ROWS
    (token if pair is None else token + PAIR_WEIGHT * pair).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, float(token), None if pair is None else float(pair)


def mean_of_means(store: Store, case: Case, pieces: int) -> float:
    """What the token loss would be as a mean of the micro-batches' means."""
    model, means = case.model(store), []
    chunks = {key: value.chunk(pieces) for key, value in case.batch.items()}
    for i in range(pieces):
        sums = model({key: value[i] for key, value in chunks.items()})
        means.append(float(sums.mlm_loss) / max(float(sums.mlm_targets), 1))
    return float(np.mean(means))


@pytest.mark.parametrize("name", CASES)
def test_pieces_of_a_batch_add_up_to_it(store: Store, tmp_path: Path, name: str) -> None:
    case = CASES[name](store)
    targets_B = (case.batch["target_ids"] != -100).sum(1)
    want, token, pair = plain(store, case)
    assert len(torch.unique(targets_B)) > 1, "the rows must differ for a mean of means to show"
    assert abs(mean_of_means(store, case, ROWS) - token) > 1e-4
    for accumulate in (1, 2, 4, 8):
        got = step(store, case, accumulate, tmp_path / str(accumulate))
        assert got.gradients.keys() == want.keys()
        for key, gradient in want.items():
            torch.testing.assert_close(got.gradients[key], gradient, rtol=1e-5, atol=1e-6, msg=key)
        assert got.row["loss/mlm"] == pytest.approx(token, abs=1e-5)
        assert got.row["spent/targets"] == int(targets_B.sum())
        assert got.row["spent/nonpad_tokens"] == int(case.batch["attention_mask"].sum())
        if pair is None:
            assert "loss/pair" not in got.row
        else:
            assert got.row["loss/pair"] == pytest.approx(pair, abs=1e-5)


RARE = ClozeMasking(count="bernoulli", rate=1e-9)


@pytest.mark.parametrize("form", [SentencePair(S), FullSentences(S), Packed(S)], ids=str)
@pytest.mark.parametrize("slots", [0, 5])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_step_without_a_target(store: Store, tmp_path: Path, form: FormatOption, slots: int, accumulate: int) -> None:
    if slots:
        case = Case(without_targets(batch_of(store, form, ClozeMasking()), *range(ROWS)))
        assert case.batch["target_ids"].shape[1] >= slots
    else:
        case = Case(batch_of(store, form, RARE))
    assert not (case.batch["target_ids"] != -100).any()
    got = step(store, case, accumulate, tmp_path / "cell")
    assert got.gradients.keys() == {name for name, _ in got.model.named_parameters()}
    assert not any(gradient.any() for gradient in got.gradients.values())
    assert all(parameter.isfinite().all() for parameter in got.model.parameters())
    assert got.row["loss/mlm"] == got.row["accuracy/mlm"] == got.row["gradient_norm"] == got.row["spent/targets"] == 0


def test_pairs_are_learnt_where_no_word_is_hidden(store: Store, tmp_path: Path) -> None:
    case = Case(batch_of(store, SentencePair(S), RARE, "order"), pair=True)
    got = step(store, case, 4, tmp_path / "cell")
    assert got.row["loss/mlm"] == 0
    assert got.row["loss/pair"] == pytest.approx(math.log(2), abs=0.1)
    assert all(gradient.isfinite().all() for gradient in got.gradients.values())
    assert got.gradients["encoder.embeddings.token.weight"].any()


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
