"""What the framework costs: milliseconds a step of Lightning, counters and logging over a plain loop of the same model.

    python benchmarks/overhead.py [--steps 400] [--rounds 7]

Both sides train the same nano model on the same batches with the same optimiser, schedule and clipping. The framework
side
is what a cell runs: the Trainer, metrics.jsonl and W&B offline, a row every 50 steps. Sides alternate within one
process. Ends with one JSON line.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from clozelab.data.batches import Batches
from clozelab.data.corpora.sotu import Sotu
from clozelab.data.formats.segment_pair import SegmentPair
from clozelab.data.loading import ClozeData, tensors
from clozelab.data.masking.token import TokenMasking
from clozelab.data.pairs import pair_objective
from clozelab.data.store import open_store
from clozelab.data.tokenizers import WordPieceOption
from clozelab.models.encoder import EncoderOption
from clozelab.models.initialise import initialise
from clozelab.models.pretraining import PretrainingModel
from clozelab.seeds import stream_key
from clozelab.tracking.wandb import WandbTracker
from clozelab.training.allocator import keep_heap
from clozelab.training.budget import Spent, StepBudget
from clozelab.training.cell import ENDLESS, make_trainer
from clozelab.training.config import TrainerOption
from clozelab.training.metric_log import MetricLog
from clozelab.training.module import PretrainingModule
from clozelab.training.optimizers import AdamWOption, LinearOption
from clozelab.training.precision import autocast


def nano(vocab_size: int, pad_id: int) -> PretrainingModel:
    """A model so small that its step is mostly overhead."""
    option = EncoderOption(hidden=32, layers=1, heads=2, ffn=64, positions=32)
    model = PretrainingModel(option, vocab_size, pad_id, pair=True)
    initialise(model, 0, 0.1)
    return model


def plain_loop(batches: Batches, steps: int) -> float:
    """Seconds a step of the loop that anybody would write."""
    model = nano(batches.store.tokenizer.vocab_size, batches.store.tokenizer.pad_id)
    option, schedule = AdamWOption(), LinearOption()
    optimizer = option.build(model)
    begin = time.perf_counter()
    for step in range(steps):
        batch = tensors(batches.batch(step))
        torch.default_generator.manual_seed(stream_key(0, "dropout", step, 0))
        for group in optimizer.param_groups:
            group["lr"] = option.lr * schedule.factor(step / steps)
        with autocast("fp32", "cpu"):
            sums = model(batch)
        (sums.mlm_loss / sums.mlm_targets + sums.pair_loss / sums.pair_rows).backward()
        option.step(optimizer, model)
        optimizer.zero_grad(set_to_none=True)
    return (time.perf_counter() - begin) / steps


def framework(batches: Batches, steps: int) -> float:
    """Seconds a step of a cell, by its own clock: start-up and the final checkpoint are not steps."""
    with tempfile.TemporaryDirectory() as folder:
        module = PretrainingModule(
            model=nano(batches.store.tokenizer.vocab_size, batches.store.tokenizer.pad_id),
            optimizer=AdamWOption(),
            schedule=LinearOption(),
            budget=StepBudget(steps=steps),
            pair_weight=1.0,
            seed=0,
            accumulate=1,
            log_every=50,
            flops_per_step=1.0,
            precision="fp32",
            device=torch.device("cpu"),
        )
        tracker = WandbTracker()
        identity: dict[str, Any] = {"cell": f"overhead-{time.time_ns()}", "seed": 0}
        tracked = tracker.start(Path(folder), identity, {})
        loggers = [MetricLog(Path(folder)), tracked]
        trainer = make_trainer(Path(folder), TrainerOption(checkpoint_every=10**9), torch.device("cpu"), loggers)
        trainer.fit(module, datamodule=ClozeData(batches, ENDLESS, 0))
        tracker.finish("finished")
        spent: Spent = module.spent
        assert spent.steps == steps
        return spent.seconds / steps


def main() -> None:
    """Alternate the two sides and print their difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_heap()
    store = open_store(Sotu(train_documents=8), WordPieceOption(vocab_size=1000))
    form = SegmentPair(max_length=32)
    examples = form.examples(store, "train")
    batches = Batches(store, examples, form, pair_objective("order"), TokenMasking(), 0, 8)
    plain_loop(batches, 50), framework(batches, 50)
    plain, ours = [], []
    for round_ in range(arguments.rounds):
        plain.append(1000 * plain_loop(batches, arguments.steps))
        ours.append(1000 * framework(batches, arguments.steps))
        print(f"round {round_ + 1}: plain {plain[-1]:.3f} ms, framework {ours[-1]:.3f} ms a step", flush=True)
    overhead = statistics.median(b - a for a, b in zip(plain, ours, strict=True))
    print(f"overhead {overhead:.3f} ms a step (goal: at most 1)")
    numbers = {"plain_ms": statistics.median(plain), "framework_ms": statistics.median(ours), "overhead_ms": overhead}
    print(json.dumps({"ratios": {"framework_over_plain": numbers["framework_ms"] / numbers["plain_ms"]}, **numbers}))


if __name__ == "__main__":
    main()
