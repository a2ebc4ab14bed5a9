"""Rotary positions: queries and keys are turned by angles that grow with the position (Su et al. 2021, section 3.2).

The score of two tokens then depends on their distance alone. Dimension k is paired with k + D/2, as in GPT-NeoX, LLaMA
and ModernBERT (the paper pairs neighbours: the same up to the order of the dimensions).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clozelab.models.position import Position, Sizes
from clozelab.options import option


class Rope(Position):
    """angle_k(i) = i * theta^(-2k/D)."""

    def __init__(self, head_width: int, theta: float, local_theta: float) -> None:
        super().__init__()
        self.head_width, self.theta, self.local_theta = head_width, theta, local_theta

    def angles(self, position: Tensor, local: bool) -> Tensor:
        """[..., D / 2]."""
        even_K = torch.arange(0, self.head_width, 2, device=position.device)
        theta = self.local_theta if local else self.theta
        return position[..., None].float() * theta ** -(even_K / self.head_width)


@option("model/position", "rope")
@dataclass
class RopeOption:
    """Rotary position embedding."""

    theta: float = 10_000.0
    """Ratio of the longest wavelength to the shortest."""
    local_theta: float | None = None
    """The same for layers with local attention (ModernBERT, Warner et al. 2024, section 2.1.2); null = theta."""

    def __post_init__(self) -> None:
        for key in ("theta", "local_theta"):
            value = getattr(self, key)
            if value is not None and not value > 1:
                raise ValueError(f"model.position.{key} must be greater than 1, not {value}")

    @property
    def longest(self) -> int | None:
        return None

    def build(self, sizes: Sizes) -> Rope:
        if sizes.head_width % 2:
            raise ValueError(
                f"model/position=rope turns pairs of dimensions: model.hidden / model.heads is {sizes.head_width}, "
                "make it even"
            )
        return Rope(sizes.head_width, self.theta, self.theta if self.local_theta is None else self.local_theta)
