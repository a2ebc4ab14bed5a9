from types import SimpleNamespace

import pytest

from clozelab.claims.guard import covers, differences, flatten, guard, guard_records, matched, mixed
from clozelab.records import Metric, Record

CLAIM = SimpleNamespace(
    id="c", arms={"base": 0, "x": 0, "y": 0}, control="base", varies=("task.pair",), matched={"nonpad_tokens": 0.01}
)


def config(pair: object = None, seed: int = 0, **changes: object) -> dict:
    return {"seed": seed, "task": {"pair": pair, "weight": 1.0}, "corruption": [0.8, 0.1], **changes}


def record(arm: str, seed: int, nonpad: float | None, status: str = "finished") -> Record:
    budgets = {"nonpad_tokens": nonpad}
    metrics = {"m": Metric(1.0, "max", 3, "y")}
    return Record("c", arm, seed, "cpu", status, f"{arm}{seed}", config(arm, seed), {}, budgets, {}, metrics)


def test_flatten_and_differences():
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1, {"e": 2}]}) == {"a.b": 1, "a.c": {}, "d": [1, {"e": 2}]}
    assert differences({"a": 1, "b": {"c": 2}}, {"b": {"c": 3}, "cache": "x"}) == {"a": (1, "(not set)"), "b.c": (2, 3)}


def test_a_declared_key_covers_what_lies_under_it_and_nothing_beside_it():
    assert covers(["task.pair"], "task.pair")
    assert covers(["task.pair"], "task.pair.rate")
    assert not covers(["task.pair"], "task.pairs")
    assert not covers(["task.pair"], "task")


def test_declared_differences_pass():
    guard(CLAIM, {"base": config(), "x": config("next"), "y": config("order")})
    guard(CLAIM, {"base": config(), "x": config({"kind": "next", "rate": 0.5})})
    guard(CLAIM, {"base": [config(seed=s) for s in range(3)], "x": [config("next", seed=s) for s in range(3)]})
    guard(CLAIM, {"x": config("next")})
    guard(CLAIM, {})


def test_where_a_cell_runs_is_no_difference():
    guard(CLAIM, {"base": config(runs_dir="a", tracker={"p": 1}), "x": config("next", runs_dir="b", data={"cache": 3})})


def test_every_undeclared_difference_is_listed_with_both_values():
    other = config("next", corruption=[1.0, 0.0], new=True)
    other["task"]["weight"] = 2.0
    with pytest.raises(ValueError) as caught:
        guard(CLAIM, {"base": config(), "x": other, "y": config("order", seed=4)})
    text = str(caught.value)
    assert "corruption is [0.8, 0.1] and [1.0, 0.0]" in text
    assert "task.weight is 1.0 and 2.0" in text
    assert "new is '(not set)' and True" in text
    assert "task.pair is" not in text
    assert "seed is" not in text
    assert "declare the key under `varies`" in text


def test_arms_that_do_not_differ_are_refused():
    with pytest.raises(ValueError, match="base and x: the same config"):
        guard(CLAIM, {"base": config(), "x": config()})
    with pytest.raises(ValueError, match="x and y: the same config"):
        guard(CLAIM, {"base": config(), "x": config("next"), "y": config("next")})


def test_seeds_of_an_arm_differ_in_the_seed_alone():
    drifted = config("next", seed=1, corruption=[0.9, 0.1])
    with pytest.raises(ValueError, match="seeds 0 and 1 of x: corruption"):
        guard(CLAIM, {"base": config(), "x": [config("next"), drifted]})
    # Even a declared key: it may differ between arms, never within one.
    with pytest.raises(ValueError, match=r"seeds 0 and 1 of x: task\.pair"):
        guard(CLAIM, {"base": config(), "x": [config("next"), config("order", seed=1)]})


def test_an_unknown_arm_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match="no arm z; it has base, x, y"):
        guard(CLAIM, {"z": config()})
    with pytest.raises(ValueError, match="no arm z"):
        guard_records(CLAIM, [record("z", 0, 1)])


def test_budgets_within_the_tolerance_match():
    assert matched(CLAIM, [record("base", 0, 1000), record("x", 0, 1010), record("y", 0, 990)]) == []


def test_a_budget_beyond_the_tolerance_is_found_per_seed():
    found = matched(
        CLAIM, [record("base", 0, 1000), record("x", 0, 1011), record("base", 1, 2000), record("x", 1, 2000)]
    )
    assert [(m.arm, m.seed, m.budget) for m in found] == [("x", 0, "nonpad_tokens")]
    assert str(found[0]) == ("nonpad_tokens of x (seed 0) is 1,011, +1.1% from the control's 1,000 (tolerance 1.0%)")


def test_a_budget_that_was_not_recorded_does_not_pass_silently():
    (found,) = matched(CLAIM, [record("base", 0, None), record("x", 0, 10)])
    assert "not recorded" in str(found)


def test_diverged_cells_stopped_early_and_are_not_compared():
    assert matched(CLAIM, [record("base", 0, 1000), record("x", 0, 10, "diverged")]) == []


def test_records_of_two_codes_or_precisions_are_named():
    one = {"code": "a", "precision": "bf16", "versions": {"torch": "2.13.0"}}
    records = [record("base", 0, 1.0), record("x", 0, 1.0)]
    for kept in records:
        kept.provenance = dict(one)
    assert mixed(records) == []
    records[1].provenance["precision"] = "fp32"
    records[1].provenance["code"] = "b"
    assert mixed(records) == [
        "code differs between the records: a, b",
        "precision differs between the records: bf16, fp32",
    ]
