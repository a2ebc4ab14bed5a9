"""A cell small enough for a test: four messages, a vocabulary of 1,000, one layer of 32."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TINY = [
    "corpus.train_documents=4",
    "tokenizer.vocab_size=1000",
    "format.max_length=48",
    "model=bert_tiny",
    "model.hidden=32",
    "model.layers=1",
    "model.ffn=64",
    "model.position.length=48",
    "batch_size=8",
    "budget=steps",
    "budget.steps=12",
    "trainer.precision=fp32",
    "trainer.threads=1",
    "trainer.log_every=4",
    "evaluation.heldout_mlm.examples=64",
    "evaluation.sentence_pairs.examples=64",
    "evaluation.sentence_pairs.probe_examples=64",
    "tracker=none",
]


def tiny(*chosen: str) -> list[str]:
    """The overrides of a small run and those chosen, less the settings of yardsticks and positions that it has not."""
    yardsticks = next((override for override in chosen if override.startswith("evaluation=")), None)
    rope = "model/position=rope" in chosen
    small = [
        override
        for override in TINY
        if yardsticks is None or not override.startswith("evaluation.") or override.split(".")[1] in yardsticks
        if not (rope and override.startswith("model.position."))
    ]
    return [*small, *chosen]


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Stores and tokenizers of the tests, kept apart from the user's."""
    before = os.environ.get("CLOZELAB_CACHE")
    os.environ["CLOZELAB_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["CLOZELAB_CACHE"]
    else:
        os.environ["CLOZELAB_CACHE"] = before


@pytest.fixture
def make_cell(tmp_path: Path) -> Callable[..., Path]:
    """make_cell(name, *overrides) -> a run directory with a frozen configuration."""
    from clozelab.running.compose import compose_run, composer
    from clozelab.running.directories import freeze

    def make(name: str, *overrides: str) -> Path:
        with composer():
            config: dict[str, Any] = compose_run(tiny(*overrides))
        freeze(tmp_path / name, config)
        return tmp_path / name

    return make
