"""Training speed against Hugging Face: as delivered, and tuned by hand. Prints one JSON line at the end.

    python benchmarks/train_speed.py [--sizes tiny mini base] [--rounds 3]

One step = forward, backward, clipping and AdamW of a BERT with 30 522 words on a fixed batch in memory, in bf16 where
the CPU has it, with dropout 0.1. Every measurement is a process of its own, and the three alternate (A B C A B C), so
that what else the machine does hits all alike; a ratio is the median over rounds of the ratio within a round.

* `ours`: clozelab's step, with its allocator setting.
* `trainer`: `transformers.Trainer` with `BertForMaskedLM` as delivered: bf16, AdamW, the C library's allocator.
* `tuned`: a loop that an expert would write around the same `BertForMaskedLM`: head on the targets only, fused AdamW,
  fused clipping, the same allocator setting, the faster of its attention implementations.

Quality, beside the speed: with weights copied over, loss and gradients in float32 agree; and after the same steps on
the same batches of English, in bf16 with dropout, the validation losses of ours and of `tuned` agree within the
spread of seeds.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

VOCAB, LENGTH, TARGETS = 30522, 128, 19
SIZES = {
    "tiny": {"hidden": 128, "layers": 2, "heads": 2, "ffn": 512},
    "mini": {"hidden": 256, "layers": 4, "heads": 4, "ffn": 1024},
    "base": {"hidden": 768, "layers": 12, "heads": 12, "ffn": 3072},
}
BATCH = {"tiny": 32, "mini": 32, "base": 8}
# (steps before the clock starts, steps on the clock), chosen so that every process measures some seconds.
STEPS = {
    "ours": {"tiny": (4, 16), "mini": (3, 8), "base": (1, 4)},
    "tuned": {"tiny": (4, 12), "mini": (3, 6), "base": (1, 3)},
    "trainer": {"tiny": (1, 4), "mini": (1, 3), "base": (1, 2)},
}
GOALS = {
    "trainer": {"tiny": 9.0, "mini": 4.5, "base": 1.8},
    "tuned": {"tiny": 1.2, "mini": 1.2, "base": 1.2},
}
PEERS = ("ours", "trainer", "tuned")


# --- batches ----------------------------------------------------------------------------------------------------------


def rows_to_batch(ids_BS: Any, seed: int) -> dict[str, Any]:
    """Mask TARGETS positions of each row (80/10/10) in the form that our models take."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    b, s = ids_BS.shape
    positions_BK = torch.rand(b, s - 2, generator=generator).argsort(1)[:, :TARGETS].sort(1)[0] + 1
    target_ids_BK = ids_BS.gather(1, positions_BK)
    kind_BK = torch.rand(b, TARGETS, generator=generator)
    random_BK = torch.randint(5, VOCAB, (b, TARGETS), generator=generator)
    shown_BK = torch.where(kind_BK < 0.8, 3, torch.where(kind_BK < 0.9, random_BK, target_ids_BK))
    return {
        "input_ids": ids_BS.scatter(1, positions_BK, shown_BK),
        "segment_ids": torch.zeros_like(ids_BS),
        "attention_mask": torch.ones_like(ids_BS, dtype=torch.bool),
        "target_positions": positions_BK,
        "target_ids": target_ids_BK,
    }


def synthetic_rows(size: str) -> Any:
    """[B, S] ids, distributed as words are (Zipf), for the clock."""
    import torch

    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(BATCH[size], LENGTH, generator=generator)
    return (5 + (VOCAB - 5) ** uniform).long().clamp(5, VOCAB - 1)


def english_rows() -> Any:
    """[R, S] ids of the packaged presidential messages: words by frequency rank, between two special ids."""
    import torch

    from clozelab.data.corpora.sotu import Sotu

    words: list[str] = []
    for document in Sotu().documents():
        words += re.findall(r"\w+|[^\w\s]", document["text"].lower())
    rank = {word: 5 + i for i, (word, _) in enumerate(Counter(words).most_common(VOCAB - 5))}
    ids = torch.tensor([rank.get(word, 1) for word in words])
    body = ids[: len(ids) // (LENGTH - 2) * (LENGTH - 2)].view(-1, LENGTH - 2)
    return torch.nn.functional.pad(torch.nn.functional.pad(body, (1, 0), value=2), (0, 1), value=4)


# --- the three peers --------------------------------------------------------------------------------------------------


def our_model(size: str, dropout: float, seed: int) -> Any:
    """(model, option)."""
    from clozelab.models.encoder import EncoderOption
    from clozelab.models.initialise import initialise
    from clozelab.models.pretraining import PretrainingModel

    option = EncoderOption(**SIZES[size], dropout=dropout, attention_dropout=dropout)  # type: ignore[arg-type]
    model = PretrainingModel(option, VOCAB, 0)
    initialise(model, seed)
    return model, option


def hf_model(size: str, dropout: float, seed: int, **kwargs: Any) -> Any:
    """BertForMaskedLM with the values of `our_model`."""
    import transformers

    from clozelab.models.hf import hf_config, to_hf_state

    ours, option = our_model(size, dropout, seed)
    config = transformers.AutoConfig.for_model(**hf_config(option, VOCAB, 0))
    model = transformers.AutoModelForMaskedLM.from_config(config, **kwargs)  # type: ignore[no-untyped-call]
    model.load_state_dict(to_hf_state(ours.state_dict(), option), strict=False)
    model.tie_weights()
    return model


def decay_groups(model: Any) -> list[dict[str, Any]]:
    """Matrices decay, biases and norms do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def our_step(model: Any, lr: float = 1e-4) -> Callable[[dict[str, Any], float], Any]:
    """A training step (batch, learning rate) -> loss."""
    from clozelab.training.optimizers import AdamWOption
    from clozelab.training.precision import autocast, choose_precision

    option = AdamWOption(lr=lr)
    optimizer = option.build(model)
    precision = choose_precision("auto", "cpu")

    def step(batch: dict[str, Any], rate: float) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = rate
        with autocast(precision, "cpu"):
            sums = model(batch)
        loss = sums.mlm_loss / sums.mlm_targets
        loss.backward()
        option.step(optimizer, model)
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def tuned_loss(model: Any, batch: dict[str, Any]) -> Any:
    """Loss of BertForMaskedLM with the head on the targets only."""
    import torch

    hidden_BSH = model.bert(batch["input_ids"])[0]
    positions_BK = batch["target_positions"]
    hidden_BKH = hidden_BSH.gather(1, positions_BK[:, :, None].expand(-1, -1, hidden_BSH.shape[-1]))
    return torch.nn.functional.cross_entropy(model.cls(hidden_BKH).flatten(0, 1).float(), batch["target_ids"].flatten())


def tuned_step(model: Any, lr: float = 1e-4) -> Callable[[dict[str, Any], float], Any]:
    """A training step (batch, learning rate) -> loss, hand-tuned."""
    import torch

    from clozelab.training.precision import autocast, choose_precision

    optimizer = torch.optim.AdamW(decay_groups(model), lr=lr, eps=1e-6, fused=True)
    precision = choose_precision("auto", "cpu")

    def step(batch: dict[str, Any], rate: float) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = rate
        with autocast(precision, "cpu"):
            loss = tuned_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def clock(step: Callable[[], None], before: int, timed: int) -> list[float]:
    """Seconds of each timed step."""
    seconds = []
    for i in range(before + timed):
        start = time.perf_counter()
        step()
        if i >= before:
            seconds.append(time.perf_counter() - start)
    return seconds


def time_loop(peer: str, size: str, attention: str) -> list[float]:
    """Seconds a step of `ours` or `tuned`."""
    from clozelab.training.allocator import keep_heap

    keep_heap()
    batch = rows_to_batch(synthetic_rows(size), 1)
    if peer == "ours":
        model, _ = our_model(size, 0.1, 0)
        step = our_step(model)
    else:
        model = hf_model(size, 0.1, 0, attn_implementation=attention)
        step = tuned_step(model)
    model.train()
    return clock(lambda: step(batch, 1e-4), *STEPS[peer][size])


def time_trainer(size: str) -> list[float]:
    """Seconds a step of `transformers.Trainer`, from the moments at which its steps end."""
    import torch
    import transformers

    from clozelab.training.precision import choose_precision

    batch = rows_to_batch(synthetic_rows(size), 1)
    labels_BS = torch.full_like(batch["input_ids"], -100).scatter(1, batch["target_positions"], batch["target_ids"])
    before, timed = STEPS["trainer"][size]
    steps = before + timed
    rows = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        for ids, labels in zip(batch["input_ids"], labels_BS, strict=True)
    ] * steps
    ends: list[float] = []

    class Ends(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as directory:
        arguments = transformers.TrainingArguments(
            output_dir=directory,
            max_steps=steps,
            per_device_train_batch_size=BATCH[size],
            learning_rate=1e-4,
            weight_decay=0.01,
            bf16=choose_precision("auto", "cpu") == "bf16",
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        model = hf_model(size, 0.1, 0)
        transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Ends()]).train()
    return [b - a for a, b in zip(ends[before - 1 :], ends[before:], strict=False)]


# --- quality ----------------------------------------------------------------------------------------------------------


def equal_at_start(size: str) -> dict[str, float]:
    """Largest differences of loss and (relative) gradients, in float32 without dropout."""
    import torch

    from clozelab.models.hf import from_hf_state

    batch = rows_to_batch(synthetic_rows(size)[:8], 1)
    ours, option = our_model(size, 0.0, 0)
    theirs = hf_model(size, 0.0, 0)
    sums = ours(batch)
    loss = sums.mlm_loss / sums.mlm_targets
    expected = tuned_loss(theirs, batch)
    loss.backward()
    expected.backward()
    difference = abs(float(loss.detach() - expected.detach()))
    state = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    if "cls.predictions.decoder.bias" in state:
        state["cls.predictions.bias"] = state["cls.predictions.decoder.bias"]
    gradients = from_hf_state(state, option)
    worst = 0.0
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        scale = max(float(g.abs().max()) for g in (gradients[name], torch.tensor(1e-6)))
        worst = max(worst, float((parameter.grad - gradients[name]).abs().max()) / scale)
    return {"loss_difference": difference, "gradient_difference": worst}


def train_to_validation(peer: str, seed: int, steps: int) -> float:
    """Validation loss of the tiny model after `steps` steps on English, in bf16 with dropout."""
    import torch

    from clozelab.models.initialise import initialise
    from clozelab.training.allocator import keep_heap
    from clozelab.training.optimizers import LinearOption
    from clozelab.training.precision import autocast, choose_precision

    keep_heap()
    rows = english_rows()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(99))
    held_out, train = rows[order[:256]], rows[order[256:]]
    ours, option = our_model("tiny", 0.1, seed)
    initialise(ours, seed)
    if peer == "ours":
        model, make = ours, our_step
    else:
        from clozelab.models.hf import to_hf_state

        model, make = hf_model("tiny", 0.1, seed), tuned_step
        model.load_state_dict(to_hf_state(ours.state_dict(), option), strict=False)
        model.tie_weights()
    step, schedule = make(model), LinearOption(warmup=0.1)
    model.train()
    torch.manual_seed(seed)
    shuffled = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))]
    for i in range(steps):
        index = (torch.arange(32) + i * 32) % len(shuffled)
        batch = rows_to_batch(shuffled[index], seed * 10_000 + i)
        step(batch, 2e-3 * schedule.factor((i + 0.5) / steps))
    model.eval()
    losses = []
    with torch.no_grad(), autocast(choose_precision("auto", "cpu"), "cpu"):
        for i in range(0, len(held_out), 32):
            batch = rows_to_batch(held_out[i : i + 32], 5_000_000 + i)
            if peer == "ours":
                sums = model(batch)
                losses.append(float(sums.mlm_loss / sums.mlm_targets))
            else:
                losses.append(float(tuned_loss(model, batch)))
    return statistics.fmean(losses)


# --- the parent -------------------------------------------------------------------------------------------------------


def worker(job: dict[str, Any]) -> Any:
    """Run one job in this process."""
    import torch

    if job["kind"] == "equal":
        return equal_at_start(job["size"])
    if job["kind"] == "validation":
        return train_to_validation(job["peer"], job["seed"], job["steps"])
    if job["kind"] == "attention":
        # The expert tries both implementations and keeps the faster one.
        tries = {name: statistics.median(time_loop("tuned", job["size"], name)) for name in ("sdpa", "eager")}
        return min(tries, key=lambda name: tries[name])
    peer, size = job["peer"], job["size"]
    seconds = time_trainer(size) if peer == "trainer" else time_loop(peer, size, job["attention"])
    return {"step": statistics.median(seconds), "threads": torch.get_num_threads()}


def run(**job: Any) -> Any:
    """Run a job in a fresh process and return its answer."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    environment["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    finished = subprocess.run(
        [sys.executable, __file__, "--worker", json.dumps(job)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(finished.stdout.splitlines()[-1])


def race(size: str, rounds: int) -> dict[str, Any]:
    """Milliseconds a step and ratios of one size."""
    attention = run(kind="attention", size=size)
    seconds: dict[str, list[float]] = {peer: [] for peer in PEERS}
    for number in range(rounds):
        for peer in PEERS:
            seconds[peer].append(run(kind="speed", peer=peer, size=size, attention=attention)["step"])
        print(
            f"{size} round {number + 1}: " + ", ".join(f"{p} {seconds[p][-1] * 1e3:.0f} ms" for p in PEERS), flush=True
        )
    ratios = {
        peer: statistics.median(theirs / ours for theirs, ours in zip(seconds[peer], seconds["ours"], strict=True))
        for peer in ("trainer", "tuned")
    }
    tokens = BATCH[size] * LENGTH
    return {
        "ms_per_step": {peer: round(statistics.median(values) * 1e3, 1) for peer, values in seconds.items()},
        "tokens_per_second": {peer: round(tokens / statistics.median(values)) for peer, values in seconds.items()},
        "ratios": {peer: round(ratio, 2) for peer, ratio in ratios.items()},
        "tuned_attention": attention,
    }


def quality(sizes: list[str], seeds: int, steps: int) -> dict[str, Any]:
    """Equality at the start and after training."""
    start = {size: run(kind="equal", size=size) for size in sizes if size != "base"}
    losses: dict[str, list[float]] = {"ours": [], "tuned": []}
    for seed in range(seeds):
        for peer, values in losses.items():
            values.append(run(kind="validation", peer=peer, seed=seed, steps=steps))
        print(f"quality seed {seed}: " + ", ".join(f"{p} {v[-1]:.4f}" for p, v in losses.items()), flush=True)
    differences = [ours - tuned for ours, tuned in zip(losses["ours"], losses["tuned"], strict=True)]
    spread = max(statistics.stdev(values) for values in losses.values()) if seeds > 1 else None
    mean = statistics.fmean(differences)
    return {
        "start": start,
        "validation_loss": losses,
        "mean_difference": round(mean, 4),
        "seed_spread": None if spread is None else round(spread, 4),
        "steps": steps,
        "passed": all(v["loss_difference"] < 1e-5 and v["gradient_difference"] < 1e-3 for v in start.values())
        and (spread is None or abs(mean) <= spread),
    }


def main() -> None:
    """Race, check the quality, print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the quality check; 0 = no check")
    parser.add_argument("--steps", type=int, default=150, help="training steps of the quality check")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(worker(json.loads(arguments.worker))))
        return
    begin = time.perf_counter()
    results = {size: race(size, arguments.rounds) for size in arguments.sizes}
    report: dict[str, Any] = {
        "benchmark": "train_speed",
        "ratios": {peer: {size: results[size]["ratios"][peer] for size in results} for peer in ("trainer", "tuned")},
        "goals": GOALS,
        "met": {peer: {size: results[size]["ratios"][peer] >= GOALS[peer][size] for size in results} for peer in GOALS},
        "sizes": results,
        "quality": quality(arguments.sizes, arguments.seeds, arguments.steps) if arguments.seeds else None,
        "rounds": arguments.rounds,
        "seconds": round(time.perf_counter() - begin),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
