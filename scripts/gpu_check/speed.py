"""`python -m gpu_check.speed '{...}'`: tokens a second of our training step and of Hugging Face's, in one loop.

Both sides train a BERT of the same sizes on one batch in memory, 15 % of its tokens to predict, in the precision the
device is fast in, with dropout, clipping and fused AdamW. Ours is the step of `training.module`; theirs is
`BertForMaskedLM` as it comes, with labels at all positions and scaled-dot-product attention. FLOPs are those that the
step needs by `clozelab.training.cost`, for both: what a side computes beyond them is its own loss.
"""

import gc
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clozelab.data.masking.cloze import ClozeMasking
from clozelab.models.encoder import EncoderOption
from clozelab.models.initialise import initialise
from clozelab.models.pretraining import PretrainingModel
from clozelab.options import build
from clozelab.running.compose import compose_run, composer
from clozelab.training import cost
from clozelab.training.allocator import keep_heap
from clozelab.training.optimizers import AdamWOption, parameter_groups
from clozelab.training.precision import autocast, choose_precision
from gpu_check.ceiling import synchronise
from gpu_check.events import tell
from gpu_check.plan import BACKENDS, Entry

PAD, MASK = 0, 103
VOCAB = {"full": 30522, "smoke": 1024}
TOKENS = {"bert_mini": 65536, "bert_base": 32768, "bert_large": 32768}
# (repeats, seconds of each, most steps of each)
CLOCK = {"full": (5, 0.4, 100), "smoke": (2, 0.0, 1)}

Step = Callable[[], Tensor]


def sequences(option: EncoderOption, entry: Entry, vocab: int, free: int) -> int:
    """Sequences a step: about TOKENS positions, fewer where they would not fit; a power of two.

    An upper estimate of the bytes of a position, from Korthikanti et al. (2022, section 4.1) in bf16 with half as much
    again for what stays float32, and the logits of every position, which only the peer has.
    """
    each = option.layers * 51 * option.hidden + 14 * vocab
    tokens = min(TOKENS.get(entry.model, 256), 0.6 * free / each)
    return 1 << int(math.log2(max(1.0, tokens / entry.length)))


def make_batch(rows: int, length: int, vocab: int, device: torch.device) -> dict[str, Tensor]:
    """Ids distributed as words are (Zipf), the same number of targets in every row, no padding."""
    generator = torch.Generator().manual_seed(0)
    targets = ClozeMasking().targets(length)
    ids_BS = (5 + (vocab - 5) ** torch.rand(rows, length, generator=generator)).long().clamp(5, vocab - 1)
    place_BK = torch.rand(rows, length - 2, generator=generator).argsort(1)[:, :targets].sort(1)[0] + 1
    target_BK = ids_BS.gather(1, place_BK)
    batch = {
        "input_ids": ids_BS.scatter(1, place_BK, MASK),
        "segment_ids": torch.zeros_like(ids_BS),
        "attention_mask": torch.ones_like(ids_BS, dtype=torch.bool),
        "target_positions": place_BK,
        "target_ids": target_BK,
        "labels": torch.full_like(ids_BS, -100).scatter(1, place_BK, target_BK),
    }
    return {key: value.to(device) for key, value in batch.items()}


def our_step(
    option: EncoderOption, vocab: int, batch: dict[str, Tensor], device: torch.device, backend: str | None
) -> Step:
    """A step of `training.module`."""
    model = PretrainingModel(option, vocab, PAD)
    initialise(model, 0)
    model = model.to(device)
    forward = _ready(model, backend)
    settings = AdamWOption(lr=1e-4)
    optimizer = settings.build(model)
    fields = {key: value for key, value in batch.items() if key != "labels"}
    precision = choose_precision("auto", device.type)

    def step() -> Tensor:
        with autocast(precision, device.type):
            sums = forward(fields)
        loss: Tensor = sums.mlm_loss / sums.mlm_targets
        loss.backward()  # type: ignore[no-untyped-call]
        settings.step(optimizer, model)
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def their_step(
    option: EncoderOption, vocab: int, batch: dict[str, Tensor], device: torch.device, backend: str | None
) -> Step:
    """A step of the loop that anybody would write around BertForMaskedLM."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=vocab,
        hidden_size=option.hidden,
        num_hidden_layers=option.layers,
        num_attention_heads=option.heads,
        intermediate_size=option.ffn,
        hidden_dropout_prob=option.dropout,
        attention_probs_dropout_prob=option.attention_dropout,
        max_position_embeddings=512,
        pad_token_id=PAD,
    )
    config._attn_implementation = "sdpa"
    with device:
        model: Any = transformers.BertForMaskedLM(config)
    forward = _ready(model, backend)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=1e-4, eps=1e-6, fused=True)
    fields = {
        "input_ids": batch["input_ids"],
        "token_type_ids": batch["segment_ids"],
        "attention_mask": batch["attention_mask"].long(),
        "labels": batch["labels"],
    }
    precision = choose_precision("auto", device.type)

    def step() -> Tensor:
        with autocast(precision, device.type):
            loss: Tensor = forward(**fields).loss
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _ready(model: Any, backend: str | None) -> Any:
    """Give the model values (which ones is no matter to the clock), and what to call for a forward pass."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.02)
    model.train()
    return model if backend is None else torch.compile(model, backend=backend)


def measure(entry: Entry, size: str, device: torch.device) -> dict[str, Any]:
    """One row of the table."""
    with composer():
        option: EncoderOption = build(compose_run([f"model={entry.model}"])["model"])
    on_gpu, vocab = device.type == "cuda", VOCAB[size]
    free = torch.cuda.mem_get_info()[0] if on_gpu else 4 * 2**30
    rows = sequences(option, entry, vocab, free)
    batch = make_batch(rows, entry.length, vocab, device)
    make = our_step if entry.peer == "ours" else their_step
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    step = make(option, vocab, batch, device, BACKENDS[size] if entry.compiled else None)

    def run(steps: int) -> float:
        synchronise(device)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronise(device)
        return time.perf_counter() - start

    first = run(1)  # compiles
    run(2)
    repeats, seconds, most = CLOCK[size]
    steps = min(max(math.ceil(seconds / run(1)), 1), most)
    taken = [run(steps) / steps for _ in range(repeats)]
    loss = float(step())
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss}")
    median = statistics.median(taken)
    targets = batch["target_ids"].shape[1]
    return {
        "precision": choose_precision("auto", device.type),
        "sequences": rows,
        "targets": targets,
        "steps": steps * repeats,
        "first_step_seconds": round(first, 2),
        "ms_per_step": round(1000 * median, 3),
        "spread": round((max(taken) - min(taken)) / median, 3),
        "tokens_per_second": round(rows * entry.length / median),
        "model_flops_per_second": cost.flops(option, rows, entry.length, vocab, targets, False) / median,
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
        "loss": round(loss, 4),
    }


def main(request: dict[str, Any]) -> int:
    """Measure the entries of a request; exit code 1 after a failure, for a fresh process is the safe way on."""
    device, size = torch.device(request["device"]), request["size"]
    keep_heap()
    start = time.monotonic()
    for fields in request["entries"]:
        entry = Entry(**fields)
        left = request["seconds"] - (time.monotonic() - start)
        if entry.peer != "ours" and importlib.util.find_spec("transformers") is None:
            tell(entry=entry.key, status="unavailable", message="transformers is not installed")
            continue
        if left < entry.seconds:
            tell(entry=entry.key, status="skipped", message=f"{left:.0f} s left, it may take {entry.seconds:.0f}")
            continue
        tell(entry=entry.key, status="interrupted", message="ended while it ran")
        try:
            found = measure(entry, size, device)
        except Exception as error:
            said = " ".join(str(error).split())[:500]
            tell(entry=entry.key, status="failed", message=f"{type(error).__name__}: {said}")
            return 1
        tell(entry=entry.key, status="measured", **found)
        # The compiler keeps what it made, and that keeps the model.
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
