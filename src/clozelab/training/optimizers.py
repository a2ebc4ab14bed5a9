"""Optimizers and learning-rate schedules.

A schedule is a function of progress, the share of the budget that is spent, whatever the budget is counted in.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clozelab.options import option


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices decay, biases and norms do not (google-research/bert, optimization.py).

    Every trainable parameter is in exactly one of them, a shared or tied one once.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def gradient_norm(model: nn.Module) -> Tensor:
    """The global norm of the gradients of a model, also where ranks have a share of each."""
    from torch.distributed.tensor import DTensor

    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@option("optimizer", "adamw")
@dataclass
class AdamWOption:
    """AdamW (Loshchilov and Hutter 2019)."""

    lr: float = 1e-3
    """Highest learning rate; the schedule multiplies it."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-6
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled decay of matrices and embeddings; biases and norms have none."""
    clip: float = 1.0
    """Largest global norm of the gradient; 0 = no clipping."""

    def __post_init__(self) -> None:
        for key in ("lr", "eps"):
            if not getattr(self, key) > 0:
                raise ValueError(f"optimizer.{key} must be positive, not {getattr(self, key)}")
        for key in ("beta1", "beta2"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"optimizer.{key} must be in [0, 1), not {getattr(self, key)}")
        for key in ("weight_decay", "clip"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"optimizer.{key} must be at least 0, not {getattr(self, key)}")

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the model's trainable parameters, all of one group in one kernel."""
        return torch.optim.AdamW(
            parameter_groups(model, self.weight_decay),
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            fused=True,
        )

    def step(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> Tensor:
        """Clip the gradients and step; returns the global norm that they had before.

        The fused kernel divides the gradients by a scale as it reads them (the interface of `torch.amp.GradScaler`), so
        clipping costs no pass of its own.
        """
        norm = gradient_norm(model)
        if self.clip > 0:
            optimizer.grad_scale = ((norm + 1e-6) / self.clip).clamp(min=1.0)  # type: ignore[attr-defined]
            optimizer.found_inf = torch.zeros_like(norm)  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            vars(optimizer).pop("grad_scale", None)
            vars(optimizer).pop("found_inf", None)
        return norm

    def clip_gradients(self, model: nn.Module) -> Tensor:
        """Clip the gradients in place, for a step that is taken elsewhere; returns the global norm that they had."""
        if self.clip > 0:
            return nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        return gradient_norm(model)


@option("schedule", "linear")
@dataclass
class LinearOption:
    """Linear warm-up from 0, then linear decay to 0 (BERT, appendix A.2)."""

    warmup: float = 0.06
    """Share of the budget over which the rate rises."""

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < 1:
            raise ValueError(f"schedule.warmup must be in [0, 1), not {self.warmup}")

    def factor(self, progress: float) -> float:
        """What multiplies the highest learning rate when `progress` in [0, 1] of the budget is spent."""
        progress = min(max(progress, 0.0), 1.0)
        if progress < self.warmup:
            return progress / self.warmup
        return (1 - progress) / (1 - self.warmup)
