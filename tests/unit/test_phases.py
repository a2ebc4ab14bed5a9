"""Length schedules and batches sized in tokens: what a run will read is fixed before it begins."""

import re
from typing import Any

import numpy as np
import pytest
from datahelp import small_store

from clozelab.data.batches import rows_of
from clozelab.data.phases import schedule_of
from clozelab.data.store import Store
from clozelab.running.compose import compose_run, composer, validate
from clozelab.training.reading import reading


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return small_store(tmp_path_factory.mktemp("store"))


def config(*overrides: str) -> dict[str, Any]:
    with composer():
        return compose_run(["format.max_length=32", "batch_size=4", "evaluation=[heldout_mlm]", *overrides])


def test_schedules() -> None:
    assert schedule_of(None, 32) == [(1.0, 32)]
    assert schedule_of([[0.9, 128], [1, 512]], 32) == [(0.9, 128), (1.0, 512)]
    for bad in ([], [0.5], [[0.9, 16]], [[0.9, 16], [0.8, 32], [1, 64]], [[0, 16], [1, 32]], "long"):
        with pytest.raises(ValueError, match="lengths is"):
            schedule_of(bad, 32)  # type: ignore[arg-type]


def test_nine_tenths_of_the_steps_are_short(store: Store) -> None:
    read = reading(config("budget=steps", "budget.steps=100", "lengths=[[0.9,16],[1,32]]"), store)
    assert read.phases.first_steps == [0, 90]
    for step, width in ((0, 16), (89, 16), (90, 32), (5000, 32)):
        assert read.phases.batch(step)["input_ids"].shape == (4, width)
    assert read.flops_of(90) > 2 * read.flops_of(89) * 0.9 > 0
    whole, half = read.phases.batch(95), read.phases.batch(95, 1, 2)
    assert np.array_equal(whole["input_ids"][1::2], half["input_ids"])


def test_shares_of_tokens_and_flops_are_kept_on_average(store: Store) -> None:
    read = reading(config("budget=tokens", "budget.tokens=100000", "lengths=[[0.75,16],[1,32]]"), store)
    (_, change), first = read.phases.first_steps, read.phases.phases[0]
    spent = sum(first.nonpad_tokens(step) for step in range(change))
    assert spent == pytest.approx(75_000, rel=0.02)
    read = reading(config("budget=flops", "budget.flops=1e12", "lengths=[[0.75,16],[1,32]]"), store)
    assert read.flops[0] * read.phases.first_steps[1] == pytest.approx(0.75e12, rel=0.02)
    with pytest.raises(ValueError, match="budget=tokens, steps or flops"):
        reading(config("budget=seconds", "lengths=[[0.75,16],[1,32]]"), store)


@pytest.mark.parametrize("form", ["segment_pair", "sentence_pair", "doc_sentences", "full_sentences", "packed"])
def test_every_format_sees_as_many_tokens_a_step(store: Store, form: str) -> None:
    read = reading(config(f"format={form}", "format.max_length=32", "batch_tokens=600"), store)
    batches = read.phases.phases[0]
    seen = [batches.nonpad_tokens(step) for step in range(50)]
    assert np.mean(seen) == pytest.approx(600, rel=0.06)
    assert seen[7] == batches.batch(7)["attention_mask"].sum()


def test_rows_come_in_multiples() -> None:
    lengths = np.asarray([10, 20, 30])
    assert rows_of(200, float(lengths.mean()), 1) == 10
    assert rows_of(200, float(lengths.mean()), 4) == 8
    assert rows_of(5, float(lengths.mean()), 4) == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=mlm_sop", "format=doc_sentences"], "task.pair=order needs sequences of two segments"),
        (["format=packed", "evaluation=[heldout_mlm,sentence_pairs]"], "evaluation.sentence_pairs needs sequences"),
        (["batch_tokens=8"], "batch_tokens is 8"),
        (["lengths=[[0.5,32],[1,9999]]"], "the longest of lengths is 9999"),
        (["lengths=[[0.5,32]]"], "the shares must rise"),
        (["lengths=[[nan,16],[1,48]]"], "lengths is"),
        (["lengths=[[0.5,inf],[1,48]]"], "lengths is"),
        (["lengths=[[0.5,16.7],[1,48]]"], "lengths is"),
        (["masking.count=bernoulli", "masking.rate=1e-12"], "no sequence of format.max_length"),
        (["evaluation=[sentence_pairs]", "evaluation.sentence_pairs.probe_l2=nan"], "probe_l2 is nan"),
    ],
)
def test_what_cannot_be_read_is_refused_before_data_is(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(config(*overrides))
