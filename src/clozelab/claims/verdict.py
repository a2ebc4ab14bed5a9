"""The verdict: what the records say about each prediction, by a rule written down before any run.

The rule (docs/statistics.md gives the reasons):

* A link (one comparison of a relation) is decided by Student's t on the paired differences, two-sided, with Holm's
  adjustment over all links of the claim, at ALPHA. The exact sign-flip p stands beside it and never decides, because
  five seeds cannot bring it below 0.0625.
* supported: adjusted p <= ALPHA and the differences lie on the predicted side of the bound.
  contradicted: adjusted p <= ALPHA and they lie on the other side.
  equivalent: a strict relation with a margin whose differences lie inside it (TOST, Holm-adjusted among the TOSTs);
  this goes before the other two, for a real difference may still be too small to matter.
  inconclusive: everything else.
* One seed decides nothing. A planned seed that is missing decides nothing either: stopping early is a choice.
* A diverged seed counts as the worst possible value of its arm. It cannot enter a mean, so the t test runs on the
  finished pairs, and its outcome stands only if every diverged seed points the same way.
* A chain is supported if all its links are, contradicted if any is.
"""

import dataclasses
import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from clozelab.claims import stats
from clozelab.claims.guard import guard_records, matched, mixed
from clozelab.claims.schema import Claim, Link, Prediction
from clozelab.records import BUDGETS, PARAMETERS, Direction, Record, read_scores

ALPHA = 0.05
MIN_SEEDS = 2

Outcome = Literal["supported", "contradicted", "equivalent", "inconclusive"]


@dataclasses.dataclass(frozen=True)
class LinkVerdict:
    """One comparison. Numbers are in the metric's unit; None where they could not be computed."""

    relation: str
    left: str
    right: str | float
    outcome: Outcome
    n: int
    """Seeds in which both arms finished."""
    seeds: tuple[int, ...]
    left_values: tuple[float, ...]
    right_values: tuple[float, ...]
    """Empty where the right-hand side is a number."""
    effect: float | None
    """Mean of left - right over the paired seeds."""
    sd: float | None
    low: float | None
    high: float | None
    """95 % t interval of the effect."""
    p: float | None
    p_holm: float | None
    sign_flip_p: float | None
    sign_flip_floor: float | None
    tost_p: float | None
    tost_p_holm: float | None
    margin: float | None
    """Of the relation (= >= <=), or the equivalence margin of a strict one."""
    detectable: float | None
    """Smallest true effect found with power 0.8 at Holm's first step."""
    bootstrap: tuple[float, float] | None
    """95 % two-level bootstrap interval (seeds x examples), where scores were given."""
    diverged: tuple[str, ...]
    missing: tuple[str, ...]
    """Cells "arm/seed" that are not there."""
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PredictionVerdict:
    """A prediction and what became of it."""

    id: str
    says: str
    metric: str
    relation: str
    direction: Direction | None
    """Which way the metric is better; None where no record holds it."""
    outcome: Outcome
    links: tuple[LinkVerdict, ...]
    paper: dict[str, Any]
    basis: str
    yardstick: str
    """The claim's note on the metric."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean and sample sd over the finished seeds of an arm (sd is None for one seed)."""

    mean: float
    sd: float | None
    n: int
    direction: Direction | None = None


@dataclasses.dataclass(frozen=True)
class ArmSummary:
    """What an arm's finished cells have in common and how they spread."""

    arm: str
    label: str
    control: bool
    finished: int
    metrics: dict[str, Spread]
    budgets: dict[str, Spread]
    parameters: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Gap:
    """A planned cell that has no finished record."""

    arm: str
    seed: int
    status: str
    """missing, failed, killed or diverged."""
    reason: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Everything a claim's records say, ready to be printed or saved."""

    claim: str
    title: str
    scale: str
    alpha: float
    planned_seeds: tuple[int, ...]
    extra_seeds: tuple[int, ...]
    """Seeds with records beyond the plan. They are used, and named: a plan extended after a look is no plan."""
    comparisons: int
    """Size of the Holm family."""
    predictions: tuple[PredictionVerdict, ...]
    arms: tuple[ArmSummary, ...]
    mismatches: tuple[str, ...]
    gaps: tuple[Gap, ...]
    provenance: tuple[dict[str, Any], ...]
    """The distinct code and machines behind the records."""
    papers: tuple[dict[str, Any], ...]
    """Source, place and what it did not control."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON containers. Floats keep 10 significant digits: the last bits differ between machines."""
        plain = _rounded(dataclasses.asdict(self))
        assert isinstance(plain, dict)
        return plain

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"

    @property
    def counts(self) -> dict[Outcome, int]:
        """Outcome -> number of predictions, in a fixed order, zeros left out."""
        order: tuple[Outcome, ...] = ("supported", "contradicted", "equivalent", "inconclusive")
        found = [prediction.outcome for prediction in self.predictions]
        return {outcome: found.count(outcome) for outcome in order if outcome in found}


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.10g}") if math.isfinite(value) else None
    return value


# Judging -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Cells:
    """The latest word on every cell of one claim and scale."""

    settled: dict[tuple[str, int], Record]
    unsettled: dict[tuple[str, int], Record]
    planned: tuple[int, ...]
    scores: Path | None

    @property
    def seeds(self) -> tuple[int, ...]:
        extra = sorted({seed for _, seed in self.settled} - set(self.planned))
        return (*self.planned, *extra)


def judge(
    claim: Claim,
    records: Iterable[Record],
    scale: str,
    *,
    seeds: Sequence[int] | None = None,
    scores: Path | None = None,
) -> Verdict:
    """Judge every prediction of a claim from records alone.

    Args:
        records: any records; those of other claims and scales are left out.
        seeds: the planned seeds (default: those of the scale).
        scores: folder to which the records' score paths are relative; with it the two-level bootstrap is computed.

    Raises:
        ValueError: the scale does not exist, the records' configs break the guard, or one cell has two results.
    """
    planned = claim.planned_seeds(scale) if seeds is None else tuple(seeds)
    mine = [record for record in records if record.claim == claim.id and record.scale == scale]
    guard_records(claim, mine)
    cells = _cells(claim, mine, planned, scores)
    settled = [cells.settled[key] for key in sorted(cells.settled)]

    drafts = [(prediction, link, _measure(claim, prediction, link, cells)) for prediction, link in _links(claim)]
    adjusted = stats.holm([draft.p for _, _, draft in drafts])
    # Only strict relations ask for equivalence as a second question; theirs is a family of its own.
    with_margin = [i for i, (prediction, _, _) in enumerate(drafts) if prediction.margin is not None]
    equivalence = dict(zip(with_margin, stats.holm([drafts[i][2].tost_p for i in with_margin]), strict=True))
    links = [
        _decide(link, prediction, draft, adjusted[i], equivalence.get(i), claim.links)
        for i, (prediction, link, draft) in enumerate(drafts)
    ]

    predictions = []
    for prediction in claim.predictions:
        own = tuple(link for link, (other, _, _) in zip(links, drafts, strict=True) if other is prediction)
        predictions.append(
            PredictionVerdict(
                id=prediction.id,
                says=prediction.says,
                metric=prediction.metric,
                relation=prediction.relation.text,
                direction=_direction(prediction.metric, settled),
                outcome=_chain([link.outcome for link in own]),
                links=own,
                paper=prediction.paper,
                basis=prediction.basis,
                yardstick=_note(claim, prediction.metric),
            )
        )
    return Verdict(
        claim=claim.id,
        title=claim.title,
        scale=scale,
        alpha=ALPHA,
        planned_seeds=planned,
        extra_seeds=tuple(seed for seed in cells.seeds if seed not in planned),
        comparisons=claim.links,
        predictions=tuple(predictions),
        arms=tuple(_summary(claim, name, settled) for name in claim.arms),
        mismatches=(*map(str, matched(claim, settled)), *mixed(settled)),
        gaps=_gaps(claim, cells),
        provenance=_provenance(settled),
        papers=tuple(
            {"paper": s.paper, "arxiv": s.arxiv, "year": s.year, "where": s.where, "not_controlled": s.not_controlled}
            for s in claim.sources
        ),
    )


def _cells(claim: Claim, records: Iterable[Record], planned: tuple[int, ...], scores: Path | None) -> _Cells:
    settled: dict[tuple[str, int], Record] = {}
    unsettled: dict[tuple[str, int], Record] = {}
    for record in records:
        key = (record.arm, record.seed)
        if not record.settled:
            unsettled[key] = record
            continue
        other = settled.setdefault(key, record)
        if other.to_json() != record.to_json():
            raise ValueError(
                f"claim {claim.id}: arm {record.arm}, seed {record.seed} has two results (cells {other.cell} and "
                f"{record.cell}); keep the evidence of one version of the experiment"
            )
    return _Cells(settled, unsettled, planned, scores)


def _links(claim: Claim) -> list[tuple[Prediction, Link]]:
    return [(prediction, link) for prediction in claim.predictions for link in prediction.relation.links]


@dataclasses.dataclass
class _Draft:
    """A link's numbers before the family is known."""

    seeds: list[int]
    left: list[float]
    right: list[float]
    differences: list[float]
    leans: dict[str, float]
    """Diverged cells, "arm/seed" (joined by + where both diverged) -> sign of left - right at their worst value."""
    missing: list[str]
    notes: list[str]
    p: float | None = None
    side: int = 0
    """+1 the differences lie where the relation says, -1 on the other side."""
    tost_p: float | None = None
    bootstrap: tuple[float, float] | None = None


def _measure(claim: Claim, prediction: Prediction, link: Link, cells: _Cells) -> _Draft:
    draft = _Draft([], [], [], [], {}, [], [])
    direction = _direction(prediction.metric, cells.settled.values())
    worst = {"max": -math.inf, "min": math.inf}
    pairs: list[list[Record]] = []
    for seed in cells.seeds:
        found = [cells.settled.get((arm, seed)) for arm in link.arms]
        absent = [f"{arm}/{seed}" for arm, record in zip(link.arms, found, strict=True) if record is None]
        if absent:
            draft.missing += absent if seed in cells.planned else []
            continue
        present = [record for record in found if record is not None]
        broken = [f"{record.arm}/{seed}" for record in present if record.status == "diverged"]
        if broken:
            values = [worst[direction] if r.status == "diverged" and direction else 0.0 for r in present]
            # Both arms at the same infinity are a tie, which speaks for nobody.
            lean = 0.0 if len(broken) == len(link.arms) == 2 else values[0] - (values[1] if len(values) == 2 else 0.0)
            draft.leans["+".join(broken)] = math.copysign(1.0, lean) if lean else 0.0
            continue
        metrics = [record.metrics.get(prediction.metric) for record in present]
        lacking = [r.arm for r, metric in zip(present, metrics, strict=True) if metric is None or metric.value is None]
        if lacking:
            draft.notes.append(f"seed {seed}: no {prediction.metric} in the record of {', '.join(lacking)}")
            draft.missing += [f"{arm}/{seed}" for arm in lacking] if seed in cells.planned else []
            continue
        held = [metric for metric in metrics if metric is not None and metric.value is not None]
        if len({metric.yardstick for metric in held}) > 1:
            draft.notes.append(f"seed {seed}: the arms were measured by different yardsticks and do not compare")
            draft.missing += [f"{arm}/{seed}" for arm in link.arms]
            continue
        values = [metric.value for metric in held if metric.value is not None]
        draft.seeds.append(seed)
        draft.left.append(values[0])
        draft.right += values[1:]
        draft.differences.append(values[0] - (values[1] if isinstance(link.right, str) else float(link.right)))
        pairs.append(present)
    if len(draft.differences) >= MIN_SEEDS:
        _test(draft, link, prediction.margin)
    if cells.scores is not None and draft.differences:
        _resample(draft, link, prediction.metric, pairs, cells.scores)
    return draft


def _test(draft: _Draft, link: Link, margin: float | None) -> None:
    """Fill in p and side: p is that of the side on which the differences lie."""
    x = draft.differences
    mean = float(np.mean(x))
    if link.sign == "=":
        inside, beyond = stats.tost(x, link.margin), stats.outside(x, link.margin)
        draft.tost_p, draft.side = inside, 1 if abs(mean) < link.margin else -1
        draft.p = inside if draft.side > 0 else beyond
        return
    bound = {">": 0.0, "<": 0.0, ">=": -link.margin, "<=": link.margin}[link.sign]
    upward = 1 if link.sign in (">", ">=") else -1
    draft.p = stats.t_test(x, bound)
    draft.side = int(math.copysign(1, mean - bound)) * upward if mean != bound else 0
    draft.tost_p = stats.tost(x, margin) if margin is not None else None


def _resample(draft: _Draft, link: Link, metric: str, pairs: Sequence[Sequence[Record]], folder: Path) -> None:
    """Fill in the two-level bootstrap, where every record has its scores for the metric."""
    sides: list[list[Any]] = [[] for _ in link.arms]
    for records in pairs:
        for side, record in zip(sides, records, strict=True):
            if record.scores is None or not (folder / record.scores.path).is_file():
                return
            loaded = read_scores(folder / record.scores.path, record.scores.sha256)
            if metric not in loaded:
                return
            side.append(loaded[metric])
    if len({array.shape for side in sides for array in side}) != 1:
        draft.notes.append("no bootstrap: the seeds were scored on different numbers of examples")
        return
    right = np.stack(sides[1]) if isinstance(link.right, str) else float(link.right)
    interval = stats.two_level_bootstrap(np.stack(sides[0]), right)
    draft.bootstrap = (interval.low, interval.high)


def _decide(
    link: Link, prediction: Prediction, draft: _Draft, p_holm: float | None, tost_holm: float | None, family: int
) -> LinkVerdict:
    n = len(draft.differences)
    outcome: Outcome = "inconclusive"
    notes = list(draft.notes)
    if tost_holm is not None and tost_holm <= ALPHA:
        outcome = "equivalent"
    elif p_holm is not None and p_holm <= ALPHA and draft.side:
        outcome = "supported" if draft.side > 0 else "contradicted"
    if n == 1:
        notes.append("one seed decides nothing")
    if draft.missing and outcome != "inconclusive":
        outcome = "inconclusive"
        notes.append("would be decided, but not every planned seed can be compared")
    if outcome != "inconclusive" and not _agrees(link, outcome, draft):
        outcome = "inconclusive"
        notes.append("diverged seeds do not point the same way as the finished ones")
    interval = stats.t_interval(draft.differences) if n >= MIN_SEEDS else None
    if interval is not None and interval.sd == 0:
        notes.append("the differences do not vary, so the sign-flip p decides")
    return LinkVerdict(
        relation=str(link),
        left=link.left,
        right=link.right,
        outcome=outcome,
        n=n,
        seeds=tuple(draft.seeds),
        left_values=tuple(draft.left),
        right_values=tuple(draft.right),
        effect=float(np.mean(draft.differences)) if n else None,
        sd=interval.sd if interval else None,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        p=draft.p,
        p_holm=p_holm,
        sign_flip_p=stats.sign_flip(draft.differences) if 1 <= n <= stats.EXACT_LIMIT else None,
        sign_flip_floor=stats.sign_flip_floor(n) if n else None,
        tost_p=draft.tost_p,
        tost_p_holm=tost_holm,
        margin=link.margin or prediction.margin,
        detectable=stats.smallest_effect(n, interval.sd, ALPHA / family) if interval else None,
        bootstrap=draft.bootstrap,
        diverged=tuple(draft.leans),
        missing=tuple(draft.missing),
        notes=tuple(notes),
    )


def _agrees(link: Link, outcome: Outcome, draft: _Draft) -> bool:
    """Whether every diverged seed, at its worst value, points where the outcome points."""
    if not draft.leans:
        return True
    if outcome == "equivalent" or (link.sign == "=" and outcome == "supported"):
        return False
    if link.sign == "=":
        wanted = math.copysign(1.0, float(np.mean(draft.differences)))
    else:
        wanted = (1.0 if link.sign in (">", ">=") else -1.0) * (1.0 if outcome == "supported" else -1.0)
    return all(lean == wanted for lean in draft.leans.values())


def _chain(outcomes: Sequence[Outcome]) -> Outcome:
    if "contradicted" in outcomes:
        return "contradicted"
    for whole in ("supported", "equivalent"):
        if all(outcome == whole for outcome in outcomes):
            return outcomes[0]
    return "inconclusive"


def _direction(metric: str, records: Iterable[Record]) -> Direction | None:
    return next((record.metrics[metric].direction for record in records if metric in record.metrics), None)


def _note(claim: Claim, metric: str) -> str:
    """The claim's note on a metric: the longest of its yardstick names that the metric starts with."""
    names = [name for name in claim.yardsticks if metric == name or metric.startswith(name + ".")]
    return claim.yardsticks[max(names, key=len)] if names else ""


# Summaries -----------------------------------------------------------------------------------------------------------


def _spread(values: Sequence[float], direction: Direction | None = None) -> Spread:
    mean, sd = stats.mean_sd(values)
    return Spread(mean, sd if len(values) > 1 else None, len(values), direction)


def _summary(claim: Claim, arm: str, settled: Iterable[Record]) -> ArmSummary:
    finished = [record for record in settled if record.arm == arm and record.status == "finished"]
    metrics = {}
    for name in sorted({name for record in finished for name in record.metrics}):
        held = [record.metrics[name] for record in finished if name in record.metrics]
        values = [metric.value for metric in held if metric.value is not None]
        metrics[name] = _spread(values, held[0].direction)
    budgets = {}
    for name in BUDGETS:
        spent = [value for record in finished if (value := record.budgets.get(name)) is not None]
        if spent:
            budgets[name] = _spread(spent)
    parameters = finished[0].parameters if finished else {}
    ordered = {name: parameters[name] for name in PARAMETERS if name in parameters}
    return ArmSummary(
        arm=arm,
        label=claim.arms[arm].label,
        control=arm == claim.control,
        finished=len(finished),
        metrics=metrics,
        budgets=budgets,
        parameters=ordered,
    )


def _gaps(claim: Claim, cells: _Cells) -> tuple[Gap, ...]:
    gaps = []
    for arm in claim.arms:
        for seed in cells.seeds:
            record = cells.settled.get((arm, seed)) or cells.unsettled.get((arm, seed))
            if record is None:
                gaps.append(Gap(arm, seed, "missing", ""))
            elif record.status != "finished":
                gaps.append(Gap(arm, seed, record.status, record.reason))
    return tuple(gaps)


def _provenance(records: Iterable[Record]) -> tuple[dict[str, Any], ...]:
    distinct = {json.dumps(record.provenance, sort_keys=True): record.provenance for record in records}
    return tuple(distinct[key] for key in sorted(distinct))


# Text ----------------------------------------------------------------------------------------------------------------


def number(value: float | None, signed: bool = False) -> str:
    """A number for people: four significant digits, a true minus, an en dash where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{value:+.4g}" if signed else f"{value:.4g}"
    return text.replace("-", "−") if "e" not in text else text


def p_value(value: float | None) -> str:
    """A p value: three decimals, or a bound."""
    if value is None:
        return "–"
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def seed_list(seeds: Sequence[int]) -> str:
    """Seeds for people: "0-4", "0, 2, 7"."""
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"{seeds[0]}–{seeds[-1]}"
    return ", ".join(map(str, seeds))


def effect_name(link: LinkVerdict) -> str:
    """What the effect is a difference of: "dynamic − static", "mlm_sop − 0.5"."""
    return f"{link.left} − {link.right if isinstance(link.right, str) else number(link.right)}"


def paper_text(paper: Mapping[str, Any]) -> str:
    """The paper's numbers of a prediction, as one line."""
    if not paper:
        return "nothing for this comparison"
    return "; ".join(f"{key} {', '.join(map(str, v)) if isinstance(v, list) else v}" for key, v in paper.items())


def found_text(link: LinkVerdict) -> str:
    """What we found for a link, as one line."""
    if link.effect is None:
        return f"{effect_name(link)}: no finished pair of seeds"
    interval = f" [{number(link.low, True)}, {number(link.high, True)}]" if link.low is not None else ""
    return f"{effect_name(link)} = {number(link.effect, True)}{interval} over {link.n} seed{'s' * (link.n != 1)}"


def verdict_text(verdict: Verdict) -> str:
    """The verdict for a terminal, plain text, 100 columns."""
    lines = [f"{verdict.claim}: {verdict.title}"]
    plan = f"scale {verdict.scale}, planned seeds {seed_list(verdict.planned_seeds)}"
    extra = f", and beyond the plan {seed_list(verdict.extra_seeds)}" if verdict.extra_seeds else ""
    lines += [f"{plan}{extra}; {verdict.comparisons} comparisons share alpha {verdict.alpha:g} (Holm)"]
    for prediction in verdict.predictions:
        better = {"max": "higher is better", "min": "lower is better", None: "not measured"}[prediction.direction]
        lines += ["", *_wrap(prediction.says, f"{prediction.outcome.upper():<13}", 13)]
        lines += [f"    {prediction.metric} ({better}): {prediction.relation}"]
        lines += _wrap(paper_text(prediction.paper), "    paper says  ", 16)
        for link in prediction.links:
            lines += _wrap(found_text(link), "    we found    ", 16)
            lines += _wrap(link_tests(link), " " * 16, 16)
            if link.diverged:
                lines += _wrap(", ".join(link.diverged), "    diverged    ", 16)
            if link.missing:
                lines += _wrap(", ".join(dict.fromkeys(link.missing)), "    missing     ", 16)
            for note in link.notes:
                lines += _wrap(note, "    note        ", 16)
        lines += _wrap(prediction.basis, "    basis       ", 16)
        if prediction.yardstick:
            lines += _wrap(prediction.yardstick, "    yardstick   ", 16)
    lines.append("")
    for paper in verdict.papers:
        for point in paper["not_controlled"]:
            lines += _wrap(point, f"paper did not control (arXiv {paper['arxiv']}): ", 4)
    for mismatch in verdict.mismatches:
        lines += _wrap(mismatch, "not equal: ", 4)
    lines += [
        f"{gap.status}: {gap.arm}, seed {gap.seed}{': ' + gap.reason if gap.reason else ''}" for gap in verdict.gaps
    ]
    return "\n".join(lines).rstrip() + "\n"


def link_tests(link: LinkVerdict) -> str:
    """The tests of a link, as one line."""
    if link.p is None:
        return "no test: it takes at least two paired seeds"
    parts = [f"p {p_value(link.p)}, Holm {p_value(link.p_holm)}"]
    parts.append(f"sign-flip {p_value(link.sign_flip_p)} (floor {p_value(link.sign_flip_floor)})")
    if link.tost_p is not None:
        parts.append(f"equivalence within {number(link.margin)}: p {p_value(link.tost_p)}")
    if link.bootstrap is not None:
        parts.append(f"bootstrap [{number(link.bootstrap[0], True)}, {number(link.bootstrap[1], True)}]")
    if link.detectable is not None:
        parts.append(f"detectable {number(link.detectable)}")
    return "; ".join(parts)


def _wrap(text: str, first: str, indent: int) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), width=100, initial_indent=first, subsequent_indent=" " * indent)
