"""Every format with a masking and a pair objective that it can carry: trained for a few steps, measured, recorded."""

from collections.abc import Callable
from pathlib import Path

import pytest

from clozelab.running.compose import compose_run, composer, validate
from clozelab.running.directories import freeze
from clozelab.training.cell import run_cell
from tests.e2e.conftest import tiny

MLM, BOTH, CLM = "evaluation=[heldout_mlm]", "evaluation=[heldout_mlm,sentence_pairs]", "evaluation=[heldout_clm]"
REPLACED = "evaluation=[heldout_replaced]"
TOLD = "evaluation=[heldout_replaced,sentence_pairs]"
DRAWN = ["masking.count=bernoulli", "masking.predicted=0.5"]
CASES = {
    "sentence pairs, order, whole words": ["format=sentence_pair", "task=mlm_sop", "masking=whole_word"],
    "segment pairs, next, spans": ["format=segment_pair", "task=mlm_nsp", "masking=span", "format.short_seq_prob=0.1"],
    "documents, n-grams": ["format=doc_sentences", "masking=ngram", MLM],
    "across documents, static": ["format=full_sentences", "masking=static", MLM],
    "packed, drawn rates": ["format=packed", "masking.rate_law=uniform", "masking.rate_to=0.4", *DRAWN, MLM],
    "left to right": ["format=full_sentences", "masking=causal", CLM],
    "left to right, packed": ["format=packed", "masking=causal", CLM, "model/position=rope"],
    "replaced tokens": ["task=replaced_tokens", REPLACED],
    "replaced tokens, order, whole words": [
        "task=replaced_tokens",
        "task.pair=order",
        "format=sentence_pair",
        "masking=whole_word",
        TOLD,
    ],
    "replaced tokens, next, static spans": [
        "task=replaced_tokens",
        "task.pair=next",
        "masking=span",
        "masking.copies=2",
        TOLD,
    ],
    "replaced tokens, packed, drawn counts": [
        "task=replaced_tokens",
        "format=packed",
        "masking.count=bernoulli",
        REPLACED,
    ],
    "replaced tokens, one encoder": [
        "task=replaced_tokens",
        "task.tie=all",
        "task.generator_width=1",
        "format=doc_sentences",
        REPLACED,
    ],
    "measured in another format": [
        "format=full_sentences",
        BOTH,
        "evaluation.heldout_mlm.format=doc_sentences",
        "evaluation.sentence_pairs.format=segment_pair",
    ],
    "short, then long": ["lengths=[[0.5,24],[1,48]]", "batch_tokens=300"],
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_of(case: str, tmp_path: Path) -> None:
    chosen = CASES[case]
    if not any(override.startswith("evaluation=") for override in chosen):
        chosen = [*chosen, BOTH]
    with composer():
        config = compose_run([*tiny(*chosen), "budget.steps=6"])
        validate(config)
    freeze(tmp_path / "run", config)
    record = run_cell(tmp_path / "run")
    assert record is not None
    assert record.status == "finished"
    assert record.budgets["steps"] == 6
    assert record.budgets["targets"] > 0
    assert record.budgets["nonpad_tokens"] <= record.budgets["tokens"]
    losses = [float(metric.value) for name, metric in record.metrics.items() if name.endswith("loss")]
    assert losses
    assert all(0 < loss < 12 for loss in losses)


def test_arms_of_two_formats_are_measured_on_the_same_sequences(make_cell: Callable[..., Path]) -> None:
    """A yardstick with a format of its own has one name, and the same examples, whatever the run was trained on."""
    records = []
    for form in ("full_sentences", "sentence_pair"):
        one = "evaluation.heldout_mlm.format=doc_sentences"
        record = run_cell(make_cell(form, f"format={form}", one, MLM, "budget.steps=2"))
        assert record is not None
        records.append(record.metrics["heldout_mlm.loss"])
    assert records[0].yardstick == records[1].yardstick
    assert records[0].n == records[1].n
    own = run_cell(make_cell("own", "format=sentence_pair", MLM, "budget.steps=2"))
    assert own is not None
    assert own.metrics["heldout_mlm.loss"].yardstick != records[0].yardstick
