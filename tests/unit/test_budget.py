"""Budgets: the share that is spent, and what a budget refuses."""

import pytest

from clozelab.options import discover, registered
from clozelab.training.budget import FlopBudget, SecondBudget, Spent, StepBudget, TokenBudget

SPENT = Spent(steps=10, tokens=2000, nonpad_tokens=1500, targets=225, examples=20, flops=1e9, seconds=2.0)


@pytest.mark.parametrize(
    ("budget", "share"),
    [
        (TokenBudget(tokens=3000), 0.5),
        (StepBudget(steps=40), 0.25),
        (FlopBudget(flops=1e9), 1.0),
        (SecondBudget(seconds=1.0), 2.0),
    ],
)
def test_the_spent_share(budget: TokenBudget, share: float) -> None:
    assert budget.progress(SPENT) == pytest.approx(share)


@pytest.mark.parametrize("name", ["tokens", "steps", "flops", "seconds"])
@pytest.mark.parametrize("amount", [0, -1])
def test_an_empty_budget_is_refused_by_name(name: str, amount: int) -> None:
    discover("clozelab.training")
    with pytest.raises(ValueError, match=rf"budget\.{name} is {amount}"):
        registered("budget")[name](**{name: amount})
