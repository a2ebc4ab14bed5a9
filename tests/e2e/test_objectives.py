"""Every format with a masking and a pair objective that it can carry: trained for a few steps, measured, recorded."""

from pathlib import Path

import pytest

from clozelab.running.compose import compose_run, composer, validate
from clozelab.running.directories import freeze
from clozelab.training.cell import run_cell
from tests.e2e.conftest import TINY

MLM, BOTH, CLM = "evaluation=[heldout_mlm]", "evaluation=[heldout_mlm,sentence_pairs]", "evaluation=[heldout_clm]"
DRAWN = ["masking.count=bernoulli", "masking.predicted=0.5"]
CASES = {
    "sentence pairs, order, whole words": ["format=sentence_pair", "task=mlm_sop", "masking=whole_word"],
    "segment pairs, next, spans": ["format=segment_pair", "task=mlm_nsp", "masking=span", "format.short_seq_prob=0.1"],
    "documents, n-grams": ["format=doc_sentences", "masking=ngram", MLM],
    "across documents, static": ["format=full_sentences", "masking=static", MLM],
    "packed, drawn rates": ["format=packed", "masking.rate_law=uniform", "masking.rate_to=0.4", *DRAWN, MLM],
    "left to right": ["format=full_sentences", "masking=causal", CLM],
    "left to right, packed": ["format=packed", "masking=causal", CLM, "model/position=rope"],
    "short, then long": ["lengths=[[0.5,24],[1,48]]", "batch_tokens=300"],
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_of(case: str, tmp_path: Path) -> None:
    chosen = CASES[case]
    yardsticks = next((override for override in chosen if override.startswith("evaluation=")), BOTH)
    # Of the settings of a small run, those whose options this one has.
    small = [
        override
        for override in TINY
        if not override.startswith("evaluation.") or override.split(".")[1] in yardsticks
        if not (override.startswith("model.position.") and "model/position=rope" in chosen)
    ]
    with composer():
        config = compose_run([*small, *chosen, "budget.steps=6"])
        validate(config)
    freeze(tmp_path / "run", config)
    record = run_cell(tmp_path / "run")
    assert record is not None
    assert record.status == "finished"
    assert record.budgets["steps"] == 6
    assert record.budgets["targets"] > 0
    assert record.budgets["nonpad_tokens"] <= record.budgets["tokens"]
    loss = record.metrics["heldout_clm.loss" if CLM in chosen else "heldout_mlm.loss"]
    assert 0 < float(loss.value) < 12
