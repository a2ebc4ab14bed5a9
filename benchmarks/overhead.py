"""What the framework costs: milliseconds a step of Lightning, counters and logging over a plain loop of the same model.

    python benchmarks/overhead.py [--block 100] [--blocks 60]

Both sides train the same nano model on the same batches with the same optimiser, schedule and clipping. The framework
side is what a cell runs: the Trainer, metrics.jsonl and W&B offline, a row every 50 steps. Within one process they take
turns after every block of steps. Ends with one JSON line.
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
from clozelab.data.masking.cloze import ClozeMasking
from clozelab.data.pairs import pair_objective
from clozelab.data.store import open_store
from clozelab.data.tokenizers import WordPieceOption
from clozelab.models.encoder import EncoderOption
from clozelab.models.initialise import initialise
from clozelab.models.positions.learned import LearnedOption
from clozelab.models.pretraining import PretrainingModel
from clozelab.seeds import stream_key
from clozelab.tracking.wandb import WandbTracker
from clozelab.training.allocator import keep_heap
from clozelab.training.budget import StepBudget
from clozelab.training.cell import ENDLESS, make_trainer
from clozelab.training.config import TrainerOption
from clozelab.training.metric_log import MetricLog
from clozelab.training.module import PretrainingModule
from clozelab.training.optimizers import AdamWOption, LinearOption
from clozelab.training.precision import autocast


def nano(vocab_size: int, pad_id: int) -> PretrainingModel:
    """A model so small that its step is mostly overhead."""
    option = EncoderOption(hidden=32, layers=1, heads=2, ffn=64, position=LearnedOption(length=32))
    model = PretrainingModel(option, vocab_size, pad_id, pair=True)
    initialise(model, 0)
    return model


class PlainLoop:
    """The loop that anybody would write."""

    def __init__(self, batches: Batches, total: int) -> None:
        self.batches, self.total, self.step = batches, total, 0
        self.model = nano(batches.store.tokenizer.vocab_size, batches.store.tokenizer.pad_id)
        self.option, self.schedule = AdamWOption(), LinearOption()
        self.optimizer = self.option.build(self.model)

    def run(self, steps: int) -> float:
        """Milliseconds a step of the next `steps` steps."""
        begin = time.perf_counter()
        for step in range(self.step, self.step + steps):
            batch = tensors(self.batches.batch(step))
            torch.default_generator.manual_seed(stream_key(0, "dropout", step, 0))
            for group in self.optimizer.param_groups:
                group["lr"] = self.option.lr * self.schedule.factor(step / self.total)
            with autocast("fp32", "cpu"):
                sums = self.model(batch)
            (sums.mlm_loss / sums.mlm_targets + sums.pair_loss / sums.pair_rows).backward()
            self.option.step(self.optimizer, self.model)
            self.optimizer.zero_grad(set_to_none=True)
        self.step += steps
        return 1000 * (time.perf_counter() - begin) / steps


class Alternating:
    """The framework's batches; between two blocks of them the plain loop does as many steps.

    So both sides meet the same weather: the framework's clock stands while the plain loop runs.
    """

    def __init__(self, batches: Batches, plain: PlainLoop, block: int) -> None:
        self.batches, self.plain, self.block, self.batch_size = batches, plain, block, batches.batch_size
        self.framework_ms: list[float] = []
        self.plain_ms: list[float] = []
        self._resumed: float | None = None

    def batch(self, step: int, rank: int = 0, world: int = 1) -> dict[str, Any]:
        """Batch `step`, after a block of the plain loop where a block begins."""
        if step % self.block == 0:
            if self._resumed is not None:
                self.framework_ms.append(1000 * (time.perf_counter() - self._resumed) / self.block)
            self.plain_ms.append(self.plain.run(self.block))
            self._resumed = time.perf_counter()
        return self.batches.batch(step, rank, world)


def alternate(batches: Batches, block: int, blocks: int) -> tuple[list[float], list[float]]:
    """(plain, framework): milliseconds a step of each block, in turn."""
    steps = block * (blocks + 1) + 1
    with tempfile.TemporaryDirectory() as folder:
        module = PretrainingModule(
            model=nano(batches.store.tokenizer.vocab_size, batches.store.tokenizer.pad_id),
            optimizer=AdamWOption(),
            schedule=LinearOption(),
            budget=StepBudget(steps=steps),
            weights={"mlm": 1.0, "pair": 1.0},
            seed=0,
            accumulate=1,
            log_every=50,
            flops_of=lambda step: 1.0,
            precision="fp32",
            device=torch.device("cpu"),
        )
        tracker = WandbTracker()
        identity: dict[str, Any] = {"cell": f"overhead-{time.time_ns()}", "seed": 0}
        tracked = tracker.start(Path(folder), identity, {})
        loggers = [MetricLog(Path(folder)), tracked]
        trainer = make_trainer(Path(folder), TrainerOption(checkpoint_every=10**9), torch.device("cpu"), loggers)
        alternating: Any = Alternating(batches, PlainLoop(batches, steps), block)
        trainer.fit(module, datamodule=ClozeData(alternating, ENDLESS, 0))
        tracker.finish("finished")
    # The first block of each side warms up.
    return alternating.plain_ms[1 : blocks + 1], alternating.framework_ms[1 : blocks + 1]


def main() -> None:
    """Alternate the two sides and print their difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block", type=int, default=100, help="steps before the other side has its turn")
    parser.add_argument("--blocks", type=int, default=60, help="blocks of each side")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_heap()
    store = open_store(Sotu(train_documents=8), WordPieceOption(vocab_size=1000))
    form = SegmentPair(max_length=32)
    examples = form.examples(store, "train")
    batches = Batches(store, examples, form, pair_objective("order"), ClozeMasking(), 0, 8)
    plain, ours = alternate(batches, arguments.block, arguments.blocks)
    differences = sorted(b - a for a, b in zip(plain, ours, strict=True))
    overhead = statistics.median(differences)
    quartiles = differences[len(differences) // 4], differences[3 * len(differences) // 4]
    print(f"overhead {overhead:.3f} ms a step, half the blocks in {quartiles[0]:.3f} to {quartiles[1]:.3f} (goal: 1)")
    numbers = {"plain_ms": statistics.median(plain), "framework_ms": statistics.median(ours), "overhead_ms": overhead}
    print(json.dumps({"ratios": {"framework_over_plain": numbers["framework_ms"] / numbers["plain_ms"]}, **numbers}))


if __name__ == "__main__":
    main()
