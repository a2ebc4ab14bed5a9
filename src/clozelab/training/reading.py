"""What a run will read: the batches of each phase of its length schedule, and what a step of each costs."""

import math
from dataclasses import dataclass
from typing import Any

from clozelab.data.batches import Batches, rows_of
from clozelab.data.example_cache import examples_of
from clozelab.data.phases import Phases, formats_of
from clozelab.data.store import Store
from clozelab.options import build
from clozelab.training import cost
from clozelab.training.budget import Spent


@dataclass(frozen=True)
class Reading:
    """The batches of a run."""

    phases: Phases
    flops: list[float]
    """Floating-point operations of a step in each phase."""

    def flops_of(self, step: int) -> float:
        """Floating-point operations of a step."""
        return self.flops[self.phases.number(step)]

    @property
    def last(self) -> Batches:
        """The batches of the last phase: yardsticks have its length."""
        return self.phases.phases[-1]


def reading(config: dict[str, Any], store: Store) -> Reading:
    """The batches that a configuration asks for, from a store.

    Raises:
        ValueError: the split gives no example, the objective or the masking cannot be had from it, or a length schedule
            stands beside a budget whose use by a step is not known beforehand.
    """
    masking, task, trainer, budget = (build(config[key]) for key in ("masking", "task", "trainer", "budget"))
    model = build(config["model"])
    generator = task.generator(model)
    first_steps, phases, flops = [0], [], []
    begin = 0.0
    for end, format_ in formats_of(config, build(config["format"])):
        examples = examples_of(store, format_, "train")
        mean_length, rows = format_.mean_length(examples), config["batch_size"]
        if config.get("batch_tokens") is not None:
            pieces = trainer.accumulate * trainer.devices
            rows = rows_of(config["batch_tokens"], mean_length, pieces)
            if rows == pieces and config["batch_tokens"] < 0.75 * pieces * mean_length:
                raise ValueError(
                    f"batch_tokens is {config['batch_tokens']}, and trainer.accumulate={trainer.accumulate} on "
                    f"trainer.devices={trainer.devices} take at least {pieces} sequences of {mean_length:.0f} tokens a "
                    "step; give more tokens, or fewer pieces"
                )
        phases.append(
            Batches(
                *(store, examples, format_, task.objective, masking, config["seed"], rows),
                first_step=first_steps[-1],
                sampled=task.samples,
            )
        )
        targets, vocab_size = masking.targets(format_.max_length), store.tokenizer.vocab_size
        flops.append(cost.flops(model, rows, format_.max_length, vocab_size, targets, task.has_pair, generator))
        if end < 1:
            positions, nonpad = rows * format_.max_length, round(rows * mean_length)
            share = budget.progress(Spent(1, positions, nonpad, rows * targets, rows, flops[-1]))
            if share == 0:
                raise ValueError(
                    "lengths goes by shares of the budget, and how much of this one a step takes is not known before "
                    "the run; choose budget=tokens, steps or flops, or lengths=null"
                )
            first_steps.append(first_steps[-1] + math.ceil((end - begin) / share))
            begin = end
    return Reading(Phases(first_steps, phases), flops)
