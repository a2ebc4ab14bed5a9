"""The root of a run's configuration, and the options of the training loop itself."""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from clozelab.options import option


@dataclass
class RunConfig:
    """Top level of `conf/train.yaml`: an unknown key here fails at compose time."""

    seed: int = 0
    """Seed of every draw: initial values, order, pairs, masks, dropout."""
    batch_size: int = 64
    """Sequences a step, over all devices and micro-batches."""
    batch_tokens: int | None = None
    """Non-pad tokens a step, in place of batch_size: as many sequences as have so many on average. Formats of unequal
    length then see the same tokens a step."""
    init_from: str | None = None
    """Folder in the Hugging Face layout (of `clozelab export` or `save_pretrained`) whose weights the run starts from;
    null: initial values are drawn. `model` and `tokenizer` must be those of the folder: see `clozelab import`."""
    lengths: list[Any] | None = None
    """A length schedule: pairs of a share of the budget and the positions of sequences until then, for example
    [[0.9,128],[1,512]]; null: format.max_length all along."""
    runs_dir: str = "runs"
    """Where run directories are made."""
    objective: str | None = None
    """Metric that a sweeper optimises, for example heldout_mlm.loss; null: none."""
    claim: str | None = None
    """The claim a cell belongs to (set by `clozelab run`)."""
    arm: str | None = None
    """The arm of the claim (set by `clozelab run`)."""
    scale: str | None = None
    """The scale of the claim (set by `clozelab run`)."""
    corpus: Any = MISSING
    tokenizer: Any = MISSING
    format: Any = MISSING
    task: Any = MISSING
    masking: Any = MISSING
    model: Any = MISSING
    optimizer: Any = MISSING
    schedule: Any = MISSING
    budget: Any = MISSING
    trainer: Any = MISSING
    evaluation: dict[str, Any] = field(default_factory=dict)
    tracker: Any = MISSING
    launcher: Any = MISSING


ConfigStore.instance().store(name="run", node=RunConfig, provider="clozelab")


@option("trainer", "cell")
@dataclass
class TrainerOption:
    """How one cell is trained. Nothing here but `precision` may change what is learned."""

    precision: str = "auto"
    """`bf16`, `fp32`, or `auto`: bf16 where the hardware multiplies it natively, else fp32."""
    accumulate: int = 1
    """Micro-batches a step. The loss is a mean over all targets of the step, so this changes memory, not the result."""
    devices: int = 1
    """Processes (ranks) of the cell."""
    strategy: str = "ddp"
    """How several ranks keep the model: `ddp`, each all of it, or `fsdp`, each a share of parameters, gradients and
    optimiser state (for models that one GPU cannot hold). This changes memory and speed, not the result."""
    num_workers: int = 0
    """Data-loading processes; batches are a pure function of the step, so this changes nothing but speed."""
    threads: int | None = None
    """CPU threads of the cell (null: all cores; `clozelab run` divides them among its slots)."""
    log_every: int = 50
    """Optimiser steps between two rows of metrics.jsonl."""
    checkpoint_every: int = 2000
    """Optimiser steps between two checkpoints; the last state is always kept."""
    checkpoint_seconds: float = 60.0
    """Seconds between two checkpoints, where one process trains (ranks could not agree on a clock)."""
    progress: bool = True
    """Show a progress bar on a terminal."""

    def __post_init__(self) -> None:
        if self.precision not in ("auto", "bf16", "fp32"):
            raise ValueError(f"trainer.precision is {self.precision!r}; use auto, bf16 or fp32")
        if self.strategy not in ("ddp", "fsdp"):
            raise ValueError(f"trainer.strategy is {self.strategy!r}; use ddp or fsdp")
        for key in ("accumulate", "devices", "log_every", "checkpoint_every"):
            if getattr(self, key) < 1:
                raise ValueError(f"trainer.{key} is {getattr(self, key)}; it must be at least 1")
        if self.strategy == "fsdp" and self.devices == 1:
            raise ValueError(
                "trainer.strategy=fsdp parts a model among ranks, and trainer.devices is 1; "
                "give trainer.devices=2 or more, or leave trainer.strategy out"
            )
        if self.num_workers < 0:
            raise ValueError(f"trainer.num_workers is {self.num_workers}; it must be at least 0")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"trainer.threads is {self.threads}; it must be at least 1, or null for all cores")
