"""Sentences of uneven length: the tokens alone through the layers, beside the same batches padded.

    python benchmarks/unpadding.py [--text FILE ...] [--model bert_mini] [--steps 20] [--rounds 5]

Real sentences, 32 a batch, padded to 128 as a format of fixed length gives them; the whole training step (forward,
backward, fused AdamW) in bf16 with dropout. Both sides take turns within one process on the same batches. Beside it the
quality gate: in fp32 without dropout both give the same loss and gradients. Ends with one JSON line.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clozelab.data.corpora.sotu import Sotu
from clozelab.data.corpora.text import Text
from clozelab.data.corpus import sentences
from clozelab.data.tokenizers import WordPieceOption
from clozelab.models.encoder import EncoderOption
from clozelab.models.initialise import initialise
from clozelab.models.pretraining import PretrainingModel
from clozelab.options import build
from clozelab.running.compose import compose_run, composer
from clozelab.training.allocator import keep_heap
from clozelab.training.optimizers import AdamWOption
from clozelab.training.precision import autocast

BATCH, LENGTH, RATE = 32, 128, 0.15
GOAL = 2.5


def read(paths: list[str]) -> list[str]:
    """The sentences of files as `corpus=text` reads them, or of the packaged messages."""
    corpus = Text(paths=paths) if paths else Sotu()
    return [sentence for document in corpus.read() for sentence in sentences(document.text, "en")]


def batches(lines: list[str], steps: int, work: Path) -> tuple[list[dict[str, Tensor]], int]:
    """(batches of single sentences [CLS] ... [SEP], padded to LENGTH; size of the vocabulary)."""
    tokenizer = WordPieceOption(vocab_size=8192).load(lambda: lines, "unpadding", work)
    rng = np.random.default_rng(0)
    chosen = rng.permutation(len(lines))[: steps * BATCH]
    encoded = tokenizer.encode_batch([lines[i] for i in chosen])
    slots = round(RATE * LENGTH)
    made = []
    for first in range(0, len(encoded), BATCH):
        ids_BS = np.full((BATCH, LENGTH), tokenizer.pad_id)
        place_BK, target_BK = np.zeros((BATCH, slots), dtype=np.int64), np.full((BATCH, slots), -100)
        for row, ids in enumerate(encoded[first : first + BATCH]):
            ids = ids[: LENGTH - 2]
            ids_BS[row, : len(ids) + 2] = [tokenizer.cls_id, *ids, tokenizer.sep_id]
            targets = np.sort(rng.permutation(len(ids))[: max(1, round(RATE * len(ids)))]) + 1
            place_BK[row, : len(targets)], target_BK[row, : len(targets)] = targets, ids_BS[row, targets]
            ids_BS[row, targets] = tokenizer.mask_id
        ids = torch.from_numpy(ids_BS)
        made.append(
            {
                "input_ids": ids,
                "segment_ids": torch.zeros_like(ids),
                "attention_mask": ids != tokenizer.pad_id,
                "target_positions": torch.from_numpy(place_BK),
                "target_ids": torch.from_numpy(target_BK),
            }
        )
    return made, tokenizer.vocab_size


def gate(option: EncoderOption, vocab_size: int, batch: dict[str, Tensor]) -> float:
    """The largest difference of loss and gradients between both forms, fp32, no dropout."""
    results = []
    for unpad in (False, True):
        model = PretrainingModel(option, vocab_size, 0)
        initialise(model, 0)
        model.encoder.unpad = unpad
        sums = model.eval()(batch)
        loss = sums.mlm_loss / sums.mlm_targets
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True) if a is not None and b is not None)


def step(model: PretrainingModel, optimizer: torch.optim.Optimizer, option: AdamWOption, batch: Any) -> None:
    """One training step."""
    with autocast("bf16", "cpu"):
        sums = model(batch)
    (sums.mlm_loss / sums.mlm_targets).backward()
    option.step(optimizer, model)
    optimizer.zero_grad(set_to_none=True)


def main() -> None:
    """Alternate the two sides and print their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="*", default=[], help="files of text (default: the packaged messages)")
    parser.add_argument("--model", default="bert_mini", help="a preset of conf/model")
    parser.add_argument("--steps", type=int, default=20, help="batches a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("~/.cache/clozelab").expanduser())
    arguments = parser.parse_args()
    with composer():
        option = build(compose_run([f"model={arguments.model}"])["model"])
    keep_heap()
    made, vocab_size = batches(read(arguments.text), arguments.steps, arguments.work)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in made)
    difference = gate(option, vocab_size, made[0])
    sides: dict[str, tuple[PretrainingModel, torch.optim.Optimizer]] = {}
    adamw = AdamWOption()
    for name, unpad in (("padded", False), ("unpadded", True)):
        model = PretrainingModel(option, vocab_size, 0)
        initialise(model, 0)
        model.encoder.unpad = unpad
        sides[name] = model, adamw.build(model)
        step(*sides[name], adamw, made[0])
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(arguments.rounds):
        for name, (model, optimizer) in sides.items():
            begin = time.perf_counter()
            for batch in made:
                step(model, optimizer, adamw, batch)
            speeds[name].append(tokens / (time.perf_counter() - begin))
        print(
            f"round {number + 1}: " + ", ".join(f"{name} {speed[-1]:,.0f} tokens/s" for name, speed in speeds.items())
        )
    medians = {name: statistics.median(speed) for name, speed in speeds.items()}
    ratio = medians["unpadded"] / medians["padded"]
    print(f"unpadded {ratio:.2f}x as fast (goal: {GOAL}); loss and gradients differ by {difference:.1e} in fp32")
    result = {
        "ratios": {"unpadded": round(ratio, 2)},
        "goals": {"unpadded": GOAL},
        "met": {"unpadded": ratio >= GOAL},
        "tokens_per_second": medians,
        "fill": tokens / (len(made) * BATCH * LENGTH),
        "difference": difference,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
