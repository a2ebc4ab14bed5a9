"""The guard: two arms may differ only in what the claim declares under `varies`.

It runs on resolved configs before the first job starts, and again on the configs inside the records before they are
judged, so that published evidence is held to the same rule as a fresh run.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from clozelab.claims.schema import Claim
from clozelab.records import Record, is_volatile

_ABSENT = "(not set)"


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A budget in which an arm and the control do not agree within the claim's tolerance."""

    budget: str
    arm: str
    seed: int
    value: float | None
    control: float | None
    relative: float | None
    """Difference over the control's value; None where one of the two was not recorded."""
    tolerance: float

    def __str__(self) -> str:
        if self.relative is None:
            return f"{self.budget} of {self.arm} (seed {self.seed}) was not recorded beside the control's"
        return (
            f"{self.budget} of {self.arm} (seed {self.seed}) is {self.value:,.0f}, {self.relative:+.1%} from the "
            f"control's {self.control:,.0f} (tolerance {self.tolerance:.1%})"
        )


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys -> values. Lists are values: an arm that changes one entry has changed the list."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, path + ".")
        else:
            flat[path] = value
    return flat


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys in which two configs differ, volatile ones aside, with both values."""
    left, right = flatten(one), flatten(other)
    return {
        key: (left.get(key, _ABSENT), right.get(key, _ABSENT))
        for key in sorted(left.keys() | right.keys())
        if not is_volatile(key) and left.get(key, _ABSENT) != right.get(key, _ABSENT)
    }


def covers(varies: Iterable[str], key: str) -> bool:
    """Whether a key equals, or lies under, one of the declared ones ("task.pair" covers "task.pair.rate", not
    "task.pairs")."""
    return any(key == declared or key.startswith(declared + ".") for declared in varies)


def guard(claim: Claim, configs: Mapping[str, Mapping[str, Any] | Sequence[Mapping[str, Any]]]) -> None:
    """Refuse arms that differ in anything undeclared.

    Args:
        configs: arm -> its resolved config, or its configs over seeds.

    Raises:
        ValueError: an arm the claim does not have; a key in which an arm differs from the control without being
            declared under `varies`; two arms that do not differ at all; seeds of one arm that differ in more than
            `seed`. All offending keys are listed with both values.
    """
    if unknown := sorted(set(configs) - set(claim.arms)):
        raise ValueError(f"claim {claim.id} has no arm {', '.join(unknown)}; it has {', '.join(claim.arms)}")
    problems: list[str] = []
    first: dict[str, Mapping[str, Any]] = {}
    for arm, given in configs.items():
        seeds = [given] if isinstance(given, Mapping) else list(given)
        if not seeds:
            continue
        first[arm] = seeds[0]
        for other in seeds[1:]:
            changed = {key: pair for key, pair in differences(seeds[0], other).items() if key != "seed"}
            problems += _lines(f"seeds {seeds[0].get('seed')} and {other.get('seed')} of {arm}", changed)
    base = claim.control if claim.control in first else next(iter(first), "")
    effective: dict[str, dict[str, tuple[Any, Any]]] = {}
    for arm, config in first.items():
        if arm == base:
            continue
        changed = {key: pair for key, pair in differences(first[base], config).items() if key != "seed"}
        effective[arm] = changed
        undeclared = {key: pair for key, pair in changed.items() if not covers(claim.varies, key)}
        problems += _lines(f"{base} and {arm}", undeclared)
    for arm, changed in effective.items():
        twin = base if not changed else next((o for o in effective if o < arm and effective[o] == changed), None)
        if twin is not None:
            problems.append(f"  {twin} and {arm}: the same config; an arm must change something")
    if problems:
        raise ValueError(
            f"claim {claim.id}: arms may differ only in {', '.join(claim.varies)}, but\n"
            + "\n".join(problems)
            + "\nMake them equal in the arms' overrides, or declare the key under `varies` in claim.yaml."
        )


def _lines(who: str, changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    return [f"  {who}: {key} is {one!r} and {other!r}" for key, (one, other) in changed.items()]


def guard_records(claim: Claim, records: Iterable[Record]) -> None:
    """`guard` over the configs that records hold; ValueError as there."""
    configs: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        configs.setdefault(record.arm, []).append(record.config)
    guard(claim, configs)


def matched(claim: Claim, records: Iterable[Record]) -> list[Mismatch]:
    """Budgets named under `matched` in which a finished arm strays from the control of the same seed.

    A diverged cell stopped early, so its budgets are not compared; the verdict lists it anyway.
    """
    finished = {(record.arm, record.seed): record for record in records if record.status == "finished"}
    found = []
    for (arm, seed), record in sorted(finished.items()):
        control = finished.get((claim.control, seed))
        if arm == claim.control or control is None:
            continue
        for budget, tolerance in claim.matched.items():
            value, base = record.budgets.get(budget), control.budgets.get(budget)
            relative = None if value is None or not base else (value - base) / base
            if relative is None or abs(relative) > tolerance:
                found.append(Mismatch(budget, arm, seed, value, base, relative, tolerance))
    return found


def mixed(records: Iterable[Record]) -> list[str]:
    """What the records' code and arithmetic differ in: runs of two versions or precisions are not one experiment."""
    asked: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "code": lambda provenance: provenance.get("code"),
        "precision": lambda provenance: provenance.get("precision"),
        "torch": lambda provenance: provenance.get("versions", {}).get("torch"),
    }
    kept = list(records)
    found = []
    for name, get in asked.items():
        values = sorted({str(get(record.provenance)) for record in kept})
        if len(values) > 1:
            found.append(f"{name} differs between the records: {', '.join(values)}")
    return found
