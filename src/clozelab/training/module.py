"""The LightningModule: one optimiser step over one global batch.

loss = w_mlm * (sum of target losses) / (targets of the step)
     + w_pair * (sum of pair losses) / (sequences of the step)
     + w_replaced * (sum of losses of replaced-token detection) / (non-pad tokens of the step)

with the parts that the task has. The means run over the whole step: all micro-batches of all ranks. A batch of 8 in one
piece, in 4 x 2 or on two ranks has one loss and one gradient. A step without targets gives 0 and zero gradients.
(Pitfall: a mean of means gives short micro-batches the weight of long ones.)
"""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from clozelab.models.pretraining import PretrainingModel
from clozelab.seeds import stream_key
from clozelab.training.budget import Spent
from clozelab.training.precision import autocast

PARTS = ("mlm", "pair", "replaced")
"""Parts of the loss."""


class Diverged(RuntimeError):
    """The loss is not finite: the cell ends here and its record says so."""


class PretrainingModule(pl.LightningModule):
    """Trains a `PretrainingModel` until its budget is spent.

    Args:
        model: encoder and heads.
        optimizer: the optimiser option (lr, clip; makes the parameter groups).
        schedule: the schedule option; its `factor(progress)` scales the learning rate.
        budget: the budget option; its `progress(spent)` ends the run at 1.
        weights: w above, by the name of the part.
        seed: of the dropout stream.
        accumulate: micro-batches a step.
        log_every: optimiser steps between two rows of the log.
        flops_of: floating-point operations of a step by its number, for the FLOP counter.
        precision: "bf16" or "fp32".
        device: where the model runs.
        cell: identity of the run, kept in its checkpoints.
        config: what that identity is made of, kept beside it: plain containers.
    """

    def __init__(
        self,
        model: PretrainingModel,
        optimizer: Any,
        schedule: Any,
        budget: Any,
        weights: Mapping[str, float],
        seed: int,
        accumulate: int,
        log_every: int,
        flops_of: Callable[[int], float],
        precision: str,
        device: torch.device,
        cell: str | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.optimizer_option = optimizer
        self.schedule = schedule
        self.budget = budget
        self.weights = dict(weights)
        self.seed = seed
        self.accumulate = accumulate
        self.log_every = log_every
        self.flops_of = flops_of
        self.precision_name = precision
        self.cell, self.config = cell, config
        self.autocast: Callable[[], AbstractContextManager[object]] = lambda: autocast(precision, device.type)
        self.spent = Spent()
        self._counts = 0, 0
        self._window: dict[str, Tensor | float] = {}
        self._clock = time.perf_counter()

    def configure_model(self) -> None:
        """Part the model among the ranks, where the strategy asks for it: with its initial or its restored values."""
        if self.device_mesh is not None:
            from clozelab.training.sharding import shard

            shard(self.model, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One fused AdamW over decayed and undecayed parameters."""
        optimizer: torch.optim.Optimizer = self.optimizer_option.build(self.model)
        return optimizer

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """On a CPU the batch is where it should be: Lightning's walk through it would cost time on every step.

        What the step counts is counted before the batch leaves: asking a GPU would wait for all it still has to do.
        """
        self._counts = int((batch["target_ids"] != -100).sum()), int(batch["attention_mask"].sum())
        return batch if device.type == "cpu" else super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_train_start(self) -> None:
        """Start the clocks."""
        self._clock = time.perf_counter()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """One optimiser step over this rank's share of the global batch."""
        # Dropout is a function of the step alone, so a resumed run draws what an uninterrupted one would have drawn.
        # Not `torch.manual_seed`: it formats a stack trace for every kind of device that may turn up later.
        on_gpu = self.device.type == "cuda"
        generator = torch.cuda.default_generators[self.device.index] if on_gpu else torch.default_generator
        generator.manual_seed(stream_key(self.seed, "dropout", self.spent.steps, self.global_rank))
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        targets, nonpad, rows = self._count(batch)

        learning_rate = self.optimizer_option.lr * self.schedule.factor(self.budget.progress(self.spent))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate

        world = self.trainer.world_size
        numbers = {"mlm": max(targets, 1), "pair": rows, "replaced": max(nonpad, 1)}
        for micro in self._micro_batches(batch):
            with self.autocast():
                output = self.model(micro)
            # DDP and FSDP average gradients over ranks; times the world size the average is the equation's sum.
            loss = world * sum(
                self.weights[part] * part_loss / number
                for part, number in numbers.items()
                if (part_loss := getattr(output, f"{part}_loss")) is not None
            )
            if world > 1:
                self.manual_backward(loss)  # arms the hooks by which gradients are averaged
            else:
                loss.backward()  # type: ignore[no-untyped-call]
            sums = {f"{part}_{of}": getattr(output, f"{part}_{of}") for part in PARTS for of in ("loss", "correct")}
            self._add_to_window(**{key: value.detach() for key, value in sums.items() if value is not None})
        norm = self.optimizer_option.step(optimizer, self.model)
        optimizer.zero_grad(set_to_none=True)
        # Lightning counts optimiser steps by its own wrapper, which manual optimisation without it leaves at 0.
        self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.increment_ready()
        self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.increment_completed()

        now = time.perf_counter()
        spent = self.spent
        spent.flops += self.flops_of(spent.steps)
        spent.steps += 1
        spent.tokens += rows * batch["input_ids"].shape[1]
        spent.nonpad_tokens += nonpad
        spent.targets += targets
        spent.examples += rows
        elapsed, self._clock = now - self._clock, now
        if world == 1:
            spent.seconds += elapsed
        # Ranks must agree on the end: they go by the seconds that the first one told them when the step began.
        done = self.budget.progress(spent) >= 1
        if world > 1:
            spent.seconds += elapsed
        self._add_to_window(seconds=elapsed, tokens=nonpad, targets=targets, rows=rows)
        if done or spent.steps % self.log_every == 0:
            self._log_row(learning_rate, norm)
        if done:
            self.trainer.should_stop = True

    def _count(self, batch: dict[str, Tensor]) -> tuple[int, int, int]:
        """Targets, non-pad positions and sequences of the step, over all ranks."""
        (targets, nonpad), rows = self._counts, len(batch["input_ids"])
        if self.trainer.world_size == 1:
            return targets, nonpad, rows
        # Rank 0 keeps the clock. Counts are exact in float64.
        seconds = self.spent.seconds if self.global_rank == 0 else 0.0
        told = torch.tensor([targets, nonpad, rows, seconds], device=self.device, dtype=torch.float64)
        torch.distributed.all_reduce(told)  # Lightning's own would put a barrier before it
        *counts, self.spent.seconds = told.tolist()
        targets, nonpad, rows = map(int, counts)
        return targets, nonpad, rows

    def _micro_batches(self, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        if self.accumulate == 1:
            return [batch]
        pieces = {key: value.chunk(self.accumulate) for key, value in batch.items()}
        return [{key: pieces[key][i] for key in pieces} for i in range(len(next(iter(pieces.values()))))]

    # --- the window between two logging steps: sums stay tensors, so no step waits for a number -----------------------

    def _add_to_window(self, **terms: Tensor | float) -> None:
        for key, value in terms.items():
            self._window[key] = self._window.get(key, 0.0) + value

    def _log_row(self, learning_rate: float, norm: Tensor) -> None:
        window, self._window = self._window, {}
        if self.trainer.world_size > 1:
            for key in [key for key in window if key.startswith(PARTS)]:
                window[key] = self.trainer.strategy.reduce(window[key], reduce_op="sum")
        sums = {key: float(value) for key, value in window.items()}
        numbers = {"mlm": sums["targets"], "pair": sums["rows"], "replaced": sums["tokens"]}
        row = {
            f"{name}/{part}": sums[f"{part}_{of}"] / max(number, 1)
            for part, number in numbers.items()
            for name, of in (("loss", "loss"), ("accuracy", "correct"))
            if f"{part}_{of}" in sums
        } | {
            "learning_rate": learning_rate,
            "gradient_norm": float(norm),
            "progress": min(self.budget.progress(self.spent), 1.0),
            "tokens_per_second": sums["tokens"] / max(sums["seconds"], 1e-9),
            **{f"spent/{key}": value for key, value in self.spent.as_dict().items() if key != "steps"},
        }
        if not math.isfinite(sum(value for name, value in row.items() if name.startswith("loss/"))):
            raise Diverged(
                f"the loss is not finite at step {self.spent.steps}; lower optimizer.lr or raise schedule.warmup"
            )
        for logger in self.loggers:
            logger.log_metrics(row, step=self.spent.steps)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the counters beside weights and optimiser state, as plain containers (the loader takes no others)."""
        checkpoint["spent"] = self.spent.as_dict()
        checkpoint["precision"] = self.precision_name
        if self.cell is not None:
            checkpoint["cell"] = self.cell
        if self.config is not None:
            checkpoint["config"] = self.config
        window = {key: value.item() if isinstance(value, Tensor) else value for key, value in self._window.items()}
        checkpoint["window"] = window
        if self._trainer is not None and self.trainer.world_size > 1:  # each rank has sums of its own
            checkpoint["windows"] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(checkpoint["windows"], window)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the counters back.

        Raises:
            ValueError: the state was trained in another precision.
        """
        if checkpoint["precision"] != self.precision_name:
            raise ValueError(
                f"the checkpoint was trained in {checkpoint['precision']}, this run is in {self.precision_name}; "
                f"set trainer.precision={checkpoint['precision']}, or remove the run directory to start again"
            )
        self.spent = Spent(**checkpoint["spent"])
        window = checkpoint["windows"][self.global_rank] if "windows" in checkpoint else checkpoint["window"]
        self._window = dict(window)
