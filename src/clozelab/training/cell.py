"""One cell: a frozen configuration in, a record out.

The run directory holds everything of the cell: config.yaml, train.log, metrics.jsonl, checkpoints/, wandb/, scores.npz,
and record.json, which is written last: a cell is done when its record exists. A cell that is started again goes on from
its newest checkpoint. Ranks of a many-device cell replay this very command, never the sweep that started it.
"""

import contextlib
import dataclasses
import faulthandler
import functools
import logging
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from clozelab import records
from clozelab.claims.guard import differences
from clozelab.data.batches import fixed_batches
from clozelab.data.example_cache import examples_of
from clozelab.data.examples import Examples
from clozelab.data.format import FormatOption, format_named
from clozelab.data.loading import ClozeData, tensors
from clozelab.data.masking.causal import CausalTargets
from clozelab.data.masking.cloze import IGNORED, ClozeMasking
from clozelab.data.pairs import pair_objective
from clozelab.data.store import cache_dir, data_fingerprint, open_store
from clozelab.evaluation.yardstick import Measured, Subject
from clozelab.models.initialise import initialise
from clozelab.models.pretraining import PretrainingModel
from clozelab.options import build
from clozelab.running.child import FIRST_RANK
from clozelab.running.directories import CHECKPOINT, FROZEN, read_frozen, say_running
from clozelab.running.job import FAILURE, RECORD, failure_text
from clozelab.running.start import origin, pinned, start_folder, start_state
from clozelab.running.trained import read_trained
from clozelab.training import cost
from clozelab.training.allocator import keep_heap
from clozelab.training.checkpoints import LastCheckpoint, Stop, Terminated, Unsaved, WholeFiles
from clozelab.training.config import TrainerOption
from clozelab.training.metric_log import MetricLog
from clozelab.training.module import Diverged, PretrainingModule
from clozelab.training.precision import choose_precision
from clozelab.training.progress import CellProgress
from clozelab.training.reading import reading

log = logging.getLogger("clozelab")

# Steps the loader offers; the budget ends the run long before.
ENDLESS = 2**40
EVALUATION_BATCH = 64


RESUME = ("auto", "must", "never")


class InUse(ValueError):
    """Another process runs the cell of this directory."""


def run_cell(directory: Path, resume: str = "auto", stop: Stop | None = None) -> records.Record | None:
    """Train and measure the cell whose config.yaml lies in `directory`; its record (None on ranks but the first).

    A directory whose record exists is done: the record is read, nothing is trained.

    Args:
        resume: go on from a checkpoint: auto (if there is one), must (there has to be one), never (start again, and put
            the old one aside).
        stop: who tells it to end.

    Raises:
        ValueError: the configuration asks for something impossible, another process holds the directory, or `resume`
            cannot be had; nothing was trained.
    """
    if resume not in RESUME:
        raise ValueError(f"resume is {resume!r}; give one of {', '.join(RESUME)}")
    stop = stop or Stop()
    if rank() > 0:
        return _run_cell(directory, stop)
    try:
        with FileLock(directory / ".lock", timeout=0):
            (directory / FAILURE).unlink(missing_ok=True)  # of an earlier attempt
            checkpoint = directory / CHECKPOINT
            done = (directory / RECORD).exists()
            if resume == "must" and not done and not checkpoint.exists():
                raise ValueError(f"{directory} holds no {CHECKPOINT} to go on from; leave resume=must out to start it")
            if resume == "never" and not done and checkpoint.exists():
                checkpoint.replace(checkpoint.with_suffix(f".{time.strftime('%Y%m%d-%H%M%S')}.ckpt"))
            return _run_cell(directory, stop)
    except Timeout as error:
        raise InUse(f"{directory} is in use by another process; a run directory has one run") from error


def rank() -> int:
    """The rank of this process among those of its cell."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _run_cell(directory: Path, stop: Stop) -> records.Record | None:
    config = read_frozen(directory)
    provenance = records.provenance()  # of the code that is loaded now, not of what it may be changed to meanwhile
    trainer_option: TrainerOption = build(config["trainer"])
    if trainer_option.threads:
        torch.set_num_threads(trainer_option.threads)
    keep_heap()
    corpus, tokenizer_option = build(config["corpus"]), build(config["tokenizer"])
    pin = pinned(config)
    cell = records.fingerprint(pin, data_fingerprint(corpus, tokenizer_option))
    identity = {key: config[key] for key in ("claim", "arm", "scale", "seed")} | {"cell": cell}
    if (directory / RECORD).exists():
        (record,) = records.read_records(directory / RECORD)
        if record.cell != cell:
            raise ValueError(f"{directory} holds the record of cell {record.cell}, not of {cell}; use a new directory")
        return record
    log.info("cell %s: %s", cell, {k: v for k, v in identity.items() if v is not None})

    rank_zero = rank() == 0
    if rank_zero:
        say_running(directory, identity)
    store = open_store(corpus, tokenizer_option, cache_dir())
    if rank_zero:
        store.tokenizer.save(directory)  # the weights mean nothing without it
    task, read = build(config["task"]), reading(config, store)
    format_, train_examples = read.last.format, read.last.examples
    tokenizer, causal = store.tokenizer, read.last.masking.causal

    def blank() -> PretrainingModel:
        option, special_ids = build(config["model"]), tokenizer.special_ids
        built: PretrainingModel = task.build(
            option, tokenizer.vocab_size, tokenizer.pad_id, causal, special_ids=special_ids
        )
        return built

    model = blank()
    initialise(model, config["seed"])
    checkpoint = directory / CHECKPOINT
    if (folder := start_folder(config)) is not None:
        provenance["init_from"] = origin(folder, pin["init_from"])
        if not checkpoint.exists():  # which holds what became of those weights
            start_from(folder, model)
    parameters = cost.parameters(model)
    for first, batches in zip(read.phases.first_steps, read.phases.phases, strict=True):
        what = (batches.examples.n, batches.format.max_length, batches.batch_size)
        log.info("data: %s; from step %d on %d sequences of %d, %d a step", store.path, first, *what)
    log.info("model: %s parameters", f"{parameters['unique']:,}")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = choose_precision(trainer_option.precision, device.type)
    module = PretrainingModule(
        model=model,
        optimizer=build(config["optimizer"]),
        schedule=build(config["schedule"]),
        budget=build(config["budget"]),
        weights=task.weights,
        seed=config["seed"],
        accumulate=trainer_option.accumulate,
        log_every=trainer_option.log_every,
        flops_of=read.flops_of,
        precision=precision,
        device=device,
        cell=cell,
        config=records.essential(pin),
    )
    tracker = build(config["tracker"])
    status = "failed"
    try:
        start_step = 0
        if checkpoint.exists():
            saved = load_checkpoint(checkpoint)
            check_same_cell(saved, module, directory)
            start_step = int(saved["spent"]["steps"])
            module.load_state_dict(saved["state_dict"])
            module.on_load_checkpoint(saved)
            log.info("resuming %s at step %d", checkpoint, start_step)
            provenance["resumed_at_step"] = start_step
            del saved  # it is as large as what is trained, on every rank
        on_gpu = device.type == "cuda"
        data = ClozeData(read.phases, ENDLESS, start_step, workers=trainer_option.num_workers, pin_memory=on_gpu)
        metric_log = MetricLog(directory)
        metric_log.rewind(start_step)
        if rank_zero:
            tracker.start(directory, identity, config)
        loggers = [logger for logger in (metric_log, tracker.logger()) if logger is not None]
        trainer = make_trainer(directory, trainer_option, device, loggers, stop)
        diverged: str | None = None
        try:
            if module.budget.progress(module.spent) < 1:
                if trainer_option.devices > 1 and rank_zero:
                    os.environ[FIRST_RANK] = str(os.getpid())
                with stop.at_the_end_of_a_step():
                    trainer.fit(
                        module, datamodule=data, ckpt_path=checkpoint if start_step else None, weights_only=True
                    )
                    trainer.save_checkpoint(checkpoint)
                if stop.number is not None:  # met after the very last step
                    raise Terminated(stop.number)
        except Diverged as error:
            diverged = str(error)
            log.warning("diverged: %s", error)
        if diverged is None and module.spent.targets == 0:
            raise ValueError("the run has had no target to learn from; give a higher masking.rate")
        if not trainer.is_global_zero:
            return None
        log.info("trained: %s", module.spent.as_dict())

        measured = Measured()
        if diverged is None:
            if module.device_mesh is not None:  # a sharded model is of no use to the only rank that is left
                model = blank()
                model.load_state_dict(read_trained(directory).state)
            model.to(device)  # Lightning brings it back to the CPU when the fit ends
            measured = measure(config, module, model, store, format_, train_examples)
        scores = records.write_scores(directory / "scores.npz", measured.scores) if measured.scores else None
        record = records.Record(
            claim=config["claim"] or "train",
            arm=config["arm"] or "train",
            scale=config["scale"] or "train",
            seed=config["seed"],
            status="diverged" if diverged else "finished",
            cell=cell,
            config=config,
            provenance=provenance
            | {
                "precision": precision,
                "threads": torch.get_num_threads(),
                "data": {
                    "fingerprint": store.fingerprint,
                    **store.counts["train"],
                    "sequences": train_examples.n,
                    **train_examples.counts,
                },
            },
            budgets=dict(module.spent.as_dict()),
            parameters={key: parameters[key] for key in records.PARAMETERS},
            metrics={name: records.Metric(**metric) for name, metric in measured.metrics.items()},
            scores=scores,
            reason=diverged or "",
        )
        tracker.summary({name: metric["value"] for name, metric in measured.metrics.items()})
        records.write_record(directory / RECORD, record)
        status = record.status
        return record
    except Terminated:
        status = "killed"
        raise
    finally:
        tracker.finish(status)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """What a checkpoint holds.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, ValueError, EOFError, OSError, LookupError, pickle.UnpicklingError) as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(
            f"{path} is no checkpoint that can be read ({said}); start again without it: "
            f"`clozelab train --resume {path.parent.parent} never`"
        ) from error
    return saved


def check_same_cell(saved: dict[str, Any], module: PretrainingModule, directory: Path) -> None:
    """Hold a checkpoint against the cell that would go on from it.

    Raises:
        ValueError: it is of another one; says in which settings they differ.
    """
    if saved.get("cell", module.cell) == module.cell:
        return
    changed = differences(saved.get("config") or {}, module.config or {}) if "config" in saved else {}
    what = ", ".join(f"{key} was {was!r} and is {now!r}" for key, (was, now) in changed.items()) or "other data"
    raise ValueError(
        f"{directory / CHECKPOINT} is of cell {saved['cell']}, and {directory / 'config.yaml'} now describes cell "
        f"{module.cell} ({what}); put the old configuration back, or start the new one in a directory of its own"
    )


def start_from(folder: Path, model: PretrainingModel) -> None:
    """Give a model the weights of a folder in the Hugging Face layout.

    Raises:
        ValueError: the folder holds another model.
    """
    loaded = start_state(folder, model)
    model.load_state_dict(loaded.state)
    log.info("weights: those of %s", folder)
    if loaded.new:
        log.info("not there, so with initial values: %s", ", ".join(loaded.new))
    if loaded.unused:
        log.info("there, and not used: %s", ", ".join(loaded.unused))


def make_trainer(
    directory: Path, option: TrainerOption, device: torch.device, loggers: list[Any], stop: Stop | None = None
) -> Any:
    """The Lightning Trainer of a cell: manual optimisation, no sanity steps, checkpoints by optimiser step."""
    import pytorch_lightning as pl
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment

    if option.threads and option.devices > 1:
        os.environ["OMP_NUM_THREADS"] = str(option.threads)  # else Lightning divides the cores among the ranks
    strategy: Any = "auto" if option.devices == 1 else "ddp"
    if option.strategy == "fsdp":
        from clozelab.training.sharding import Sharded

        strategy = Sharded(option.devices)
    return pl.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=option.devices,
        strategy=strategy,
        max_epochs=1,
        logger=loggers,
        callbacks=[
            LastCheckpoint(directory / CHECKPOINT, option.checkpoint_every, option.checkpoint_seconds, stop),
            *([CellProgress()] if option.progress and sys.stderr.isatty() else []),
        ],
        # Ranks are started here, also where a batch system is found: its tasks are cells, not ranks.
        plugins=[WholeFiles(), LightningEnvironment()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=directory,
    )


def measure(
    config: dict[str, Any],
    module: PretrainingModule,
    model: PretrainingModel,
    store: Any,
    format_: Any,
    train_examples: Any,
) -> Measured:
    """Apply every chosen yardstick to the trained model."""
    model.eval()
    device = next(model.parameters()).device
    sampled = build(config["task"]).samples

    @functools.cache
    def cut(split: str, format_name: str | None) -> tuple[FormatOption, Examples]:
        if format_name is None:
            return format_, train_examples if split == "train" else examples_of(store, format_, split)
        named = format_named(format_name, format_.max_length)
        return named, examples_of(store, named, split)

    def batches(
        split: str,
        *,
        pair: str = "none",
        masked: bool = True,
        seed: int = 0,
        limit: int,
        rate: float = 0.15,
        causal: bool = False,
        format: str | None = None,
    ) -> Iterator[dict[str, Tensor]]:
        seen, examples = cut(split, format)
        masking: ClozeMasking | CausalTargets = CausalTargets() if causal else ClozeMasking(rate=rate)
        for batch in fixed_batches(
            store, examples, seen, pair_objective(pair), masking, seed, EVALUATION_BATCH, limit, sampled
        ):
            if not masked:
                rows_BK, used_BK = np.arange(len(batch["input_ids"]))[:, None], batch["target_ids"] != IGNORED
                rows_N = np.broadcast_to(rows_BK, used_BK.shape)[used_BK]
                batch["input_ids"][rows_N, batch["target_positions"][used_BK]] = batch["target_ids"][used_BK]
            yield {key: value.to(device) for key, value in tensors(batch).items()}

    subject = Subject(
        model=model,
        pair_objective=build(config["task"]).pair,
        batches=batches,
        device=device,
        autocast=module.autocast,
    )
    total = Measured()
    for name, node in config["evaluation"].items():
        begin = time.perf_counter()
        yardstick = build(node)
        measured = yardstick.measure(subject)
        # Two values compare only where data, format and the yardstick's own settings are the same.
        seen = config["format"] if yardstick.format is None else dataclasses.asdict(yardstick.sees(format_))
        fixed = records.fingerprint({"yardstick": node, "format": seen}, store.fingerprint)
        for metric in measured.metrics.values():
            metric["yardstick"] = f"{name}@{fixed}"
        total |= measured
        values = {key: round(float(metric["value"]), 4) for key, metric in measured.metrics.items()}
        log.info("%s (%.1f s): %s", name, time.perf_counter() - begin, values)
    return total


def main(folder: str, resume: str = "auto") -> int:
    """Run the cell of a directory. Exit code 0 done, 1 failed, 2 refused, 128 + signal when it was ended."""
    directory = Path(folder)
    if not (directory / FROZEN).is_file():
        print(f"clozelab: {directory} is no run directory: it has no config.yaml", file=sys.stderr)
        return 2
    handlers: list[logging.Handler] = [logging.FileHandler(directory / "train.log")]
    if sys.stderr.isatty():
        handlers.append(logging.StreamHandler())
    first = rank() == 0
    level, who = (logging.INFO, "") if first else (logging.WARNING, f"rank {rank()}: ")
    logging.basicConfig(level=level, format=f"%(asctime)s %(name)s {who}%(message)s", handlers=handlers, force=True)
    logging.raiseExceptions = False  # a full disk costs lines of the log, and is told of once, below
    logging.captureWarnings(True)
    warnings.filterwarnings("ignore", module="pytorch_lightning|lightning_fabric")
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    faulthandler.enable(file=handlers[0].stream)  # type: ignore[attr-defined]

    stop = Stop()
    stop.answer_signals()
    try:
        run_cell(directory, resume, stop)
        return 0
    except InUse as error:  # of which the files here tell, not of this process
        print(f"clozelab: {error}", file=sys.stderr)
        return 2
    except ValueError as error:
        reason, code, status = str(error), 2, "failed"
        log.error("refused: %s", error, exc_info=True)
    except Terminated as error:
        reason, code, status = str(error), 128 + error.number, "killed"
        log.error("killed: %s", error)
        if not first:
            return 0  # all ranks agreed; another code would have Lightning kill the first one while it tidies up
    except Unsaved as error:
        reason, code, status = str(error), 1, "failed"
        log.error("failed: %s", error)
    except BaseException as error:
        reason, code, status = f"{type(error).__name__}: {error}", 1, "failed"
        if "by peer" in reason:  # gloo: Connection closed (or reset) by peer
            reason = f"another rank of the cell has ended, killed or for want of memory ({type(error).__name__})"
        log.error("failed: %s\n%s", reason, traceback.format_exc())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # it ends anyway, and has only this left to say
    one_line = " ".join(reason.split())
    if not _say_why(directory, status, one_line) and not first:
        return code  # another rank failed before, and this one of it
    print(f"clozelab: {one_line}", file=sys.stderr)
    if status == "killed":
        print(f"clozelab: `clozelab train --resume {directory}` goes on from its checkpoint", file=sys.stderr)
    return code


def _say_why(directory: Path, status: str, reason: str) -> bool:
    """Leave word of the end of an attempt; False if a rank has done so: what came first is the cause."""
    failure = directory / FAILURE
    try:
        with failure.open("x") as file:
            file.write(failure_text(directory, status, reason))
    except FileExistsError:
        return False
    except OSError:
        with contextlib.suppress(OSError):  # half a file says nothing
            failure.unlink()
    return True
