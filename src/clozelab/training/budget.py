"""Budgets: what is held equal between arms, and when a run has had its share.

The learning-rate schedule is a function of the spent share of the budget, whatever its unit, so two arms that see a
different number of tokens a step still pass through the same schedule.
"""

from dataclasses import asdict, dataclass

from clozelab.options import option


@dataclass
class Spent:
    """What a run has consumed so far, over all ranks."""

    steps: int = 0
    """Optimiser updates."""
    tokens: int = 0
    """Positions, padding included."""
    nonpad_tokens: int = 0
    """Positions that hold a token."""
    targets: int = 0
    """Positions that were predicted."""
    examples: int = 0
    """Sequences."""
    flops: float = 0.0
    """Floating-point operations by the convention of `training.cost`."""
    seconds: float = 0.0
    """Seconds inside the training loop, earlier parts of an interrupted run counted in."""

    def as_dict(self) -> dict[str, float]:
        """The counters as a plain dict, as the record and the checkpoint keep them."""
        return asdict(self)


def _positive(key: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"budget.{key} is {value}; it must be greater than 0")


@option("budget", "tokens")
@dataclass
class TokenBudget:
    """Stop when this many non-pad tokens were seen (the default: padding is not paid for)."""

    tokens: int = 10_000_000
    """Non-pad tokens."""

    def __post_init__(self) -> None:
        _positive("tokens", self.tokens)

    def progress(self, spent: Spent) -> float:
        """Spent share of the budget; the run ends at 1."""
        return spent.nonpad_tokens / self.tokens


@option("budget", "steps")
@dataclass
class StepBudget:
    """Stop after this many optimiser updates."""

    steps: int = 1_000
    """Optimiser updates."""

    def __post_init__(self) -> None:
        _positive("steps", self.steps)

    def progress(self, spent: Spent) -> float:
        """Spent share of the budget; the run ends at 1."""
        return spent.steps / self.steps


@option("budget", "flops")
@dataclass
class FlopBudget:
    """Stop when this many floating-point operations were spent: arms of unequal cost at equal compute."""

    flops: float = 1e15
    """Floating-point operations, forward and backward."""

    def __post_init__(self) -> None:
        _positive("flops", self.flops)

    def progress(self, spent: Spent) -> float:
        """Spent share of the budget; the run ends at 1."""
        return spent.flops / self.flops


@option("budget", "seconds")
@dataclass
class SecondBudget:
    """Stop after this much training time. The only budget that is not reproducible to the bit."""

    seconds: float = 600.0
    """Seconds inside the training loop."""

    def __post_init__(self) -> None:
        _positive("seconds", self.seconds)

    def progress(self, spent: Spent) -> float:
        """Spent share of the budget; the run ends at 1."""
        return spent.seconds / self.seconds
