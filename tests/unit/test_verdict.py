import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from clozelab.claims import stats
from clozelab.claims.schema import Claim, load_claim
from clozelab.claims.verdict import Verdict, judge, number, p_value, seed_list, verdict_text
from clozelab.records import Metric, Record, write_scores

NOISE = [0.011, -0.008, 0.003, -0.012, 0.006, 0.009, -0.004, 0.001]


def claim(folder: Path, *predictions: tuple | dict, seeds: int = 5, **changes: object) -> Claim:
    """A claim with the given predictions: (metric, relation[, margin])."""
    items = []
    for index, given in enumerate(predictions):
        metric, relation, *margin = given
        item = {"id": f"p{index}", "says": f"says {index}", "metric": metric, "relation": relation, "basis": "stated"}
        items.append(item | ({"margin": margin[0]} if margin else {}))
    content = {
        "id": "c",
        "title": "T",
        "says": "S",
        "sources": [{"paper": "P", "arxiv": "1", "year": 2019, "where": "Table 1", "not_controlled": ["one run"]}],
        "arms": {arm: {"overrides": [f"x={arm}"]} for arm in ("base", "a", "b")},
        "control": "base",
        "varies": ["x"],
        "matched": {"steps": 0.0},
        "yardsticks": {"acc": "an accuracy", "acc.own": "by its own head"},
        "predictions": items,
        "seeds": list(range(8)),
        "scales": {"cpu": {"overrides": [], "seeds": seeds, "says": "s", "expected_time": "t"}},
        **changes,
    }
    (folder / "c").mkdir(exist_ok=True)
    (folder / "c" / "claim.yaml").write_text(yaml.safe_dump(content))
    return load_claim(folder / "c")


def record(arm: str, seed: int, status: str = "finished", steps: int = 10, **metrics: float | Metric) -> Record:
    held = {
        name.replace("__", "."): value
        if isinstance(value, Metric)
        else Metric(value, "min" if name == "loss" else "max", 100, "fixed")
        for name, value in metrics.items()
    }
    config = {"seed": seed, "x": arm}
    return Record("c", arm, seed, "cpu", status, f"{arm}{seed}", config, {"commit": "f00"}, {"steps": steps}, {}, held)


def arms(metric: str = "acc", n: int = 5, **means: float) -> list[Record]:
    """n seeds of each arm: a shared seed effect (which pairing removes), the arm's mean, and small own noise."""
    return [
        record(arm, seed, **{metric: mean + 0.1 * seed + NOISE[(seed + 3 * k) % 8] * 0.1})
        for k, (arm, mean) in enumerate(means.items())
        for seed in range(n)
    ]


def outcome(verdict: Verdict) -> str:
    (prediction,) = verdict.predictions
    return prediction.outcome


@pytest.mark.parametrize(
    ("metric", "relation", "means", "expected"),
    [
        ("acc", "a > b", {"a": 0.7, "b": 0.6}, "supported"),
        ("acc", "a > b", {"a": 0.6, "b": 0.7}, "contradicted"),
        ("acc", "a > b", {"a": 0.6, "b": 0.6003}, "inconclusive"),
        ("loss", "a < b", {"a": 3.0, "b": 3.1}, "supported"),
        ("loss", "a < b", {"a": 3.1, "b": 3.0}, "contradicted"),
        ("acc", "a > b > base", {"a": 0.7, "b": 0.6, "base": 0.5}, "supported"),
        ("acc", "a > b > base", {"a": 0.7, "b": 0.6, "base": 0.65}, "contradicted"),
        ("acc", "a > b > base", {"a": 0.7, "b": 0.6, "base": 0.6003}, "inconclusive"),
        ("acc", "a = b within 0.01", {"a": 0.6, "b": 0.6003}, "supported"),
        ("acc", "a = b within 0.01", {"a": 0.7, "b": 0.6}, "contradicted"),
        ("acc", "a = b within 0.0011", {"a": 0.6, "b": 0.6003}, "inconclusive"),
        ("acc", "a >= b - 0.01", {"a": 0.598, "b": 0.6}, "supported"),
        ("acc", "a >= b - 0.01", {"a": 0.7, "b": 0.6}, "supported"),
        ("acc", "a >= b - 0.01", {"a": 0.5, "b": 0.6}, "contradicted"),
        ("loss", "a <= b + 0.01", {"a": 3.002, "b": 3.0}, "supported"),
        ("loss", "a <= b + 0.01", {"a": 3.1, "b": 3.0}, "contradicted"),
    ],
)
def test_outcomes(tmp_path, metric, relation, means, expected):
    verdict = judge(claim(tmp_path, (metric, relation)), arms(metric, **means), "cpu")
    assert outcome(verdict) == expected
    assert verdict.counts == {expected: 1}


def constant(values: list[float], **other: list[float]) -> list[Record]:
    return [record("a", seed, acc=value) for seed, value in enumerate(values)]


@pytest.mark.parametrize(
    ("relation", "values", "expected"),
    [
        ("a > 0.5", [0.71, 0.72, 0.69, 0.70, 0.73], "supported"),
        ("a > 0.5", [0.41, 0.42, 0.39, 0.40, 0.43], "contradicted"),
        ("a > 0.5", [0.51, 0.48, 0.52, 0.49, 0.51], "inconclusive"),
        ("a = 0.5 within 0.03", [0.51, 0.50, 0.505, 0.495, 0.51], "supported"),
        ("a = 0.5 within 0.03", [0.61, 0.60, 0.605, 0.595, 0.61], "contradicted"),
        ("a = 0.5 within 0.03", [0.55, 0.45, 0.52, 0.47, 0.51], "inconclusive"),
    ],
)
def test_a_number_on_the_right_is_a_one_sample_test(tmp_path, relation, values, expected):
    verdict = judge(claim(tmp_path, ("acc", relation)), constant(values), "cpu")
    assert outcome(verdict) == expected
    link = verdict.predictions[0].links[0]
    assert link.right_values == ()
    assert link.effect == pytest.approx(np.mean(values) - 0.5)


def test_numbers_of_a_link_are_those_of_the_statistics(tmp_path):
    records = arms(a=0.7, b=0.6, base=0.5)
    verdict = judge(claim(tmp_path, ("acc", "a > b"), ("acc", "base > b")), records, "cpu")
    first, second = (prediction.links[0] for prediction in verdict.predictions)
    x = [l - r for l, r in zip(first.left_values, first.right_values, strict=True)]
    assert (first.n, first.seeds) == (5, (0, 1, 2, 3, 4))
    assert first.p == stats.t_test(x)
    assert [first.p_holm, second.p_holm] == stats.holm([first.p, second.p])
    assert (first.low, first.high) == (stats.t_interval(x).low, stats.t_interval(x).high)
    assert first.sign_flip_p == first.sign_flip_floor == 0.0625
    assert first.detectable == stats.smallest_effect(5, first.sd, 0.025)
    assert first.sd < 0.01  # the seed effect of 0.1 a seed is gone: differences are paired


def test_a_margin_makes_a_small_difference_equivalent_even_where_it_is_real(tmp_path):
    records = arms(a=0.605, b=0.6)
    assert outcome(judge(claim(tmp_path, ("acc", "a > b")), records, "cpu")) == "supported"
    assert outcome(judge(claim(tmp_path, ("acc", "a > b", 0.02)), records, "cpu")) == "equivalent"
    assert outcome(judge(claim(tmp_path, ("acc", "b > a", 0.02)), records, "cpu")) == "equivalent"
    assert outcome(judge(claim(tmp_path, ("acc", "a > b", 0.005)), records, "cpu")) == "supported"


def test_one_seed_is_never_supported(tmp_path):
    single = claim(tmp_path, ("acc", "a > b"), seeds=1)
    verdict = judge(single, arms(n=1, a=0.9, b=0.1), "cpu")
    assert outcome(verdict) == "inconclusive"
    assert "one seed decides nothing" in verdict_text(verdict)


def test_every_comparison_counts_in_holm_even_one_that_nobody_measured(tmp_path):
    records = [
        record(arm, seed, acc=base + value) for arm, base in (("a", 0.1), ("b", 0.0)) for seed, value in
        enumerate([0.0, 0.0, 0.0, 0.0, 0.0] if arm == "b" else [0.04, -0.03, 0.08, -0.07, 0.11])
    ]  # fmt: skip
    alone = judge(claim(tmp_path, ("acc", "a > b")), records, "cpu")
    p = alone.predictions[0].links[0].p
    assert 0.01 < p < 0.05
    assert outcome(alone) == "supported"
    many = judge(claim(tmp_path, ("acc", "a > b"), *[("gone", "a > b > base")] * 2), records, "cpu")
    assert many.comparisons == 5
    assert many.predictions[0].links[0].p_holm == pytest.approx(5 * p)
    assert many.predictions[0].outcome == "inconclusive"


def test_a_missing_planned_seed_holds_the_outcome_back_and_is_listed(tmp_path):
    records = arms(a=0.7, b=0.6)
    part = [r for r in records if (r.arm, r.seed) != ("b", 3)]
    verdict = judge(claim(tmp_path, ("acc", "a > b")), part, "cpu")
    link = verdict.predictions[0].links[0]
    assert (outcome(verdict), link.n, link.missing) == ("inconclusive", 4, ("b/3",))
    assert ("b", 3, "missing") in [(gap.arm, gap.seed, gap.status) for gap in verdict.gaps]
    assert outcome(judge(claim(tmp_path, ("acc", "a > b")), part, "cpu", seeds=[0, 1, 2])) == "supported"


def test_an_arm_of_no_concern_may_be_missing(tmp_path):
    verdict = judge(claim(tmp_path, ("acc", "a > b")), arms(a=0.7, b=0.6), "cpu")
    assert outcome(verdict) == "supported"
    assert {gap.arm for gap in verdict.gaps} == {"base"}


def test_a_failed_cell_is_missing_with_its_reason_until_it_has_a_result(tmp_path):
    failed = record("b", 3, "failed")
    failed.reason = "out of memory"
    records = [failed, *arms(a=0.7, b=0.6, base=0.5)]
    assert not judge(claim(tmp_path, ("acc", "a > b")), records, "cpu").gaps
    part = [r for r in records if (r.arm, r.seed, r.status) != ("b", 3, "finished")]
    (gap,) = judge(claim(tmp_path, ("acc", "a > b")), part, "cpu").gaps
    assert (gap.status, gap.reason) == ("failed", "out of memory")


def test_seeds_beyond_the_plan_are_used_and_named(tmp_path):
    verdict = judge(claim(tmp_path, ("acc", "a > b")), arms(n=8, a=0.7, b=0.6), "cpu")
    assert verdict.extra_seeds == (5, 6, 7)
    assert verdict.predictions[0].links[0].n == 8
    assert "beyond the plan 5–7" in verdict_text(verdict)


@pytest.mark.parametrize(
    ("metric", "relation", "means", "broken", "expected"),
    [
        ("acc", "a > b", {"a": 0.7, "b": 0.6}, ["b"], "supported"),  # the loser diverged: that only agrees
        ("acc", "a > b", {"a": 0.7, "b": 0.6}, ["a"], "inconclusive"),
        ("acc", "a > b", {"a": 0.7, "b": 0.6}, ["a", "b"], "inconclusive"),
        ("acc", "a > b", {"a": 0.6, "b": 0.7}, ["a"], "contradicted"),
        ("acc", "a > b", {"a": 0.6, "b": 0.7}, ["b"], "inconclusive"),
        ("loss", "a < b", {"a": 3.0, "b": 3.1}, ["b"], "supported"),
        ("loss", "a < b", {"a": 3.0, "b": 3.1}, ["a"], "inconclusive"),
        ("acc", "a = b within 0.1", {"a": 0.6, "b": 0.6}, ["b"], "inconclusive"),
        ("acc", "a = b within 0.01", {"a": 0.7, "b": 0.6}, ["b"], "contradicted"),
        ("acc", "a = b within 0.01", {"a": 0.7, "b": 0.6}, ["a"], "inconclusive"),
        ("acc", "a >= b - 0.01", {"a": 0.6, "b": 0.6}, ["b"], "supported"),
        ("acc", "a >= b - 0.01", {"a": 0.6, "b": 0.6}, ["a"], "inconclusive"),
        ("acc", "a > 0.5", {"a": 0.7}, ["a"], "inconclusive"),
        ("loss", "a > 3", {"a": 4.0}, ["a"], "supported"),
    ],
)
def test_a_diverged_seed_counts_as_the_worst_value_of_its_arm(tmp_path, metric, relation, means, broken, expected):
    records = arms(metric, **means)
    if metric == "acc" and "a > 0.5" in relation:
        records = constant([0.71, 0.72, 0.69, 0.70, 0.73])
    if relation == "a > 3":
        records = [record("a", seed, loss=4 + 0.01 * seed) for seed in range(5)]
    records = [r for r in records if r.seed != 2 or r.arm not in broken]
    records += [
        record(arm, 2, **{metric: Metric(math.nan, "min" if metric == "loss" else "max", 0, "fixed")}) for arm in broken
    ]
    verdict = judge(claim(tmp_path, (metric, relation)), records, "cpu")
    link = verdict.predictions[0].links[0]
    assert link.n == 4
    assert link.diverged == ("+".join(f"{arm}/2" for arm in broken),)
    assert outcome(verdict) == expected
    assert {gap.status for gap in verdict.gaps if gap.arm in broken} == {"diverged"}
    assert "diverged" in verdict_text(verdict)


def test_a_diverged_seed_rules_out_equivalence(tmp_path):
    records = [r for r in arms(a=0.605, b=0.6) if (r.arm, r.seed) != ("b", 2)] + [record("b", 2, "diverged")]
    assert outcome(judge(claim(tmp_path, ("acc", "a > b", 0.02)), records, "cpu")) == "inconclusive"


def test_when_everything_diverged_nothing_is_decided(tmp_path):
    records = [record(arm, seed, "diverged") for arm in ("a", "b") for seed in range(5)]
    verdict = judge(claim(tmp_path, ("acc", "a > b")), records, "cpu")
    assert outcome(verdict) == "inconclusive"
    assert len(verdict.predictions[0].links[0].diverged) == 5


def test_values_that_do_not_vary_are_not_infinitely_sure(tmp_path):
    records = [record(arm, seed, acc=value) for arm, value in (("a", 0.75), ("b", 0.5)) for seed in range(5)]
    verdict = judge(claim(tmp_path, ("acc", "a > b")), records, "cpu")
    assert verdict.predictions[0].links[0].p == 0.0625
    assert outcome(verdict) == "inconclusive"
    more = [record(arm, seed, acc=value) for arm, value in (("a", 0.75), ("b", 0.5)) for seed in range(8)]
    assert outcome(judge(claim(tmp_path, ("acc", "a > b"), seeds=8), more, "cpu")) == "supported"


def test_different_yardsticks_do_not_compare(tmp_path):
    records = arms(a=0.7)
    records += [record("b", seed, acc=Metric(0.5 + 0.1 * seed, "max", 100, "other masks")) for seed in range(5)]
    verdict = judge(claim(tmp_path, ("acc", "a > b")), records, "cpu")
    assert outcome(verdict) == "inconclusive"
    assert "different yardsticks" in verdict_text(verdict)


def test_a_metric_that_a_record_lacks_is_named(tmp_path):
    verdict = judge(claim(tmp_path, ("typo", "a > b")), arms(a=0.7, b=0.6), "cpu")
    assert outcome(verdict) == "inconclusive"
    assert "no typo in the record of a, b" in verdict_text(verdict)


def test_the_guard_holds_for_records_too(tmp_path):
    records = arms(a=0.7, b=0.6)
    records[0].config["lr"] = 3
    with pytest.raises(ValueError, match="lr is"):
        judge(claim(tmp_path, ("acc", "a > b")), records, "cpu")


def test_two_results_of_one_cell_are_refused_and_a_repeated_line_is_not(tmp_path):
    records = arms(a=0.7, b=0.6)
    judge(claim(tmp_path, ("acc", "a > b")), records + records, "cpu")
    with pytest.raises(ValueError, match="arm a, seed 0 has two results"):
        judge(claim(tmp_path, ("acc", "a > b")), [*records, record("a", 0, acc=0.1)], "cpu")


def test_other_claims_and_scales_are_left_out(tmp_path):
    records = arms(a=0.7, b=0.6)
    foreign = record("a", 0, acc=0.0)
    foreign.claim = "another"
    verdict = judge(claim(tmp_path, ("acc", "a > b")), [foreign, *records], "cpu")
    assert verdict.predictions[0].links[0].n == 5
    with pytest.raises(ValueError, match="no scale 'paper'"):
        judge(claim(tmp_path, ("acc", "a > b")), records, "paper")


def test_budgets_that_do_not_match_are_said(tmp_path):
    records = [record(arm, seed, steps=10 + (arm == "a"), acc=0.1 * seed + NOISE[seed]) for arm in ("base", "a")
               for seed in range(5)]  # fmt: skip
    verdict = judge(claim(tmp_path, ("acc", "a > base")), records, "cpu")
    assert len(verdict.mismatches) == 5
    assert "steps of a (seed 0) is 11, +10.0%" in verdict_text(verdict)


def test_the_bootstrap_is_computed_where_scores_lie_and_never_decides(tmp_path):
    rng = np.random.default_rng(0)
    records = arms(a=0.7, b=0.6)
    for r in records:
        r.scores = write_scores(tmp_path / f"{r.cell}.npz", {"acc": r.metrics["acc"].value + rng.normal(0, 0.1, 50)})
    without = judge(claim(tmp_path, ("acc", "a > b")), records, "cpu")
    verdict = judge(claim(tmp_path, ("acc", "a > b")), records, "cpu", scores=tmp_path)
    low, high = verdict.predictions[0].links[0].bootstrap
    assert low < 0.1 < high
    assert without.predictions[0].links[0].bootstrap is None
    assert outcome(without) == outcome(verdict)
    write_scores(tmp_path / "a0.npz", {"acc": np.zeros(50)})
    with pytest.raises(ValueError, match="sha256"):
        judge(claim(tmp_path, ("acc", "a > b")), records, "cpu", scores=tmp_path)


def test_order_of_the_records_does_not_matter(tmp_path):
    records = arms(a=0.7, b=0.6, base=0.5)
    c = claim(tmp_path, ("acc", "a > b > base"), ("acc", "a = b within 0.2"))
    assert judge(c, records, "cpu").to_json() == judge(c, records[::-1], "cpu").to_json()


def test_a_verdict_is_plain_json_even_with_nothing_to_say(tmp_path):
    c = claim(tmp_path, ("acc.own", "a > b"))
    for records in ([], arms(n=1, a=0.5), arms(a=0.7, b=0.6)):
        verdict = judge(c, records, "cpu")
        assert json.loads(verdict.to_json()) == verdict.to_dict()
        assert verdict.predictions[0].yardstick == "by its own head"
        assert "INCONCLUSIVE" in verdict_text(verdict)
    assert judge(claim(tmp_path, ("accuracy", "a > b")), [], "cpu").predictions[0].yardstick == ""


def test_text_shows_paper_found_and_not_controlled(tmp_path):
    text = verdict_text(judge(claim(tmp_path, ("acc", "a > b")), arms(a=0.7, b=0.6), "cpu"))
    for part in ("SUPPORTED", "paper says", "we found    a − b = +0.", "paper did not control", "one run", "acc: a"):
        assert part in text.replace("acc (higher is better): a", "acc: a"), part
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (math.inf, "–"), (-0.51234, "−0.5123"), (3.0, "3"), (1e-7, "1e-07"), (123456.0, "1.235e+05")],
)
def test_numbers_for_people(value, text):
    assert number(value) == text
    assert p_value(0.0004) == "<0.001"
    assert p_value(0.0625) == "0.062"
    assert seed_list([0, 1, 2]) == "0–2"
    assert seed_list([0, 2]) == "0, 2"
    assert seed_list([]) == ""


def test_the_rule_keeps_its_error_rate(tmp_path):
    """Under no difference at all, at most 5 % of claims with three predictions get any decided outcome."""
    c = claim(tmp_path, ("acc", "a > b"), ("acc", "b > base"), ("acc", "a > base"))
    rng = np.random.default_rng(0)
    decided = 0
    for _ in range(120):
        values = rng.normal(0, 1, (3, 5))
        records = [
            record(arm, seed, acc=values[k, seed]) for k, arm in enumerate(("base", "a", "b")) for seed in range(5)
        ]
        decided += any(p.outcome != "inconclusive" for p in judge(c, records, "cpu").predictions)
    assert decided / 120 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 120)
