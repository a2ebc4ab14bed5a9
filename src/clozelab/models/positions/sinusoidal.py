"""Sines and cosines of fixed wavelengths (Vaswani et al. 2017, section 3.5).

e[2k] = sin(i / base^(2k/E))     e[2k+1] = cos(i / base^(2k/E))
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clozelab.models.position import Position, Sizes
from clozelab.options import option


class Sinusoidal(Position):
    """Fixed vectors, computed where they are needed: any length."""

    def __init__(self, embedding: int, base: float) -> None:
        super().__init__()
        self.embedding, self.base = embedding, base

    def embed(self, position: Tensor) -> Tensor:
        """[..., E]."""
        even_K = torch.arange(0, self.embedding, 2, device=position.device)
        angle = position[..., None].float() * self.base ** -(even_K / self.embedding)
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., : self.embedding]


@option("model/position", "sinusoidal")
@dataclass
class SinusoidalOption:
    """The original transformer's position encoding."""

    base: float = 10_000.0
    """Ratio of the longest wavelength to the shortest."""

    def __post_init__(self) -> None:
        if not self.base > 1:
            raise ValueError(f"model.position.base must be greater than 1, not {self.base}")

    @property
    def longest(self) -> int | None:
        return None

    def build(self, sizes: Sizes) -> Sinusoidal:
        return Sinusoidal(sizes.embedding, self.base)
