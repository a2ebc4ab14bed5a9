"""The report of a claim: README.md, plot.png and verdict.json, from the claim and its verdict alone.

Equal inputs give equal bytes (no times, no host names), so a report that was not regenerated after its evidence
changed is found by writing it again and comparing (`is_stale`).
"""

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clozelab.claims.schema import Claim, Source
from clozelab.claims.verdict import (
    ArmSummary,
    LinkVerdict,
    Outcome,
    PredictionVerdict,
    Spread,
    Verdict,
    effect_name,
    link_tests,
    number,
    p_value,
    paper_text,
    seed_list,
)
from clozelab.records import BUDGETS, PARAMETERS, Direction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart by every kind of colour vision; the outcome is written out beside it anyway.
OUTCOME_COLOURS: dict[Outcome, str] = {
    "supported": "#009E73",
    "contradicted": "#D55E00",
    "equivalent": "#0072B2",
    "inconclusive": "#7A7A7A",
}
_INK, _SOFT, _FAINT, _GRID = "#222222", "#555555", "#9A9A9A", "#E4E4E4"
_WIDE = 0.088
"""Inches that a character of a 9 pt label takes, generously."""


def write_report(claim: Claim, verdict: Verdict, folder: Path) -> None:
    """Write README.md, plot.png and verdict.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(readme(claim, verdict), encoding="utf-8")
    (folder / "verdict.json").write_text(verdict.to_json(), encoding="utf-8")
    draw(claim, verdict, folder / "plot.png")


def is_stale(claim: Claim, verdict: Verdict, folder: Path) -> bool:
    """Whether the report in `folder` is not the one that the claim and its verdict give today.

    The plot is compared by the digest of the verdict it was drawn from, which it carries: its pixels depend on the
    version of matplotlib.
    """
    wanted = {"README.md": readme(claim, verdict), "verdict.json": verdict.to_json()}
    for name, text in wanted.items():
        if not (folder / name).is_file() or (folder / name).read_text(encoding="utf-8") != text:
            return True
    plot = folder / "plot.png"
    return not plot.is_file() or _digest(verdict).encode() not in plot.read_bytes()


def _digest(verdict: Verdict) -> str:
    return hashlib.sha256(verdict.to_json().encode()).hexdigest()


# README --------------------------------------------------------------------------------------------------------------


def readme(claim: Claim, verdict: Verdict) -> str:
    """The text of README.md."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # the product is Markdown, and its inputs are the project's own
    )
    metrics, uneven = _metric_rows(verdict)
    return environment.get_template("readme.md.jinja").render(
        claim=claim,
        verdict=verdict,
        summary=summary(verdict),
        metrics=metrics,
        uneven=uneven,
        budgets=_budget_rows(verdict),
        beside=[_beside(claim, source, verdict) for source in claim.sources if source.numbers and _columns(source)],
        provenance=_provenance_lines(verdict),
        arrow=arrow,
        effect=_effect,
        found=lambda link: f"{effect_name(link)} = {_effect(link)} over {link.n} seed{'s' * (link.n != 1)}",
        link_tests=link_tests,
        p_value=p_value,
        paper_text=paper_text,
        seed_list=seed_list,
    )


def summary(verdict: Verdict) -> str:
    """The outcomes counted: "5 of 6 predictions supported, 1 contradicted"."""
    total = len(verdict.predictions)
    first, *rest = (f"{n} {outcome}" for outcome, n in verdict.counts.items())
    n, outcome = first.split(" ", 1)
    return ", ".join([f"{n} of {total} prediction{'s' * (total != 1)} {outcome}", *rest])


def arrow(direction: Direction | None) -> str:
    """Which way a metric is better, as a sign."""
    return {"max": "↑", "min": "↓", None: ""}[direction]


def plus_minus(mean: float, sd: float | None, factor: float = 1.0) -> str:
    """ "0.5123 ± 0.0041": as many decimals as two digits of the sd ask for."""
    mean = mean * factor
    if sd is None:
        return number(mean)
    sd = sd * factor
    decimals = _decimals(sd) if sd > 0 else 4
    return f"{mean:.{decimals}f} ± {sd:.{decimals}f}".replace("-", "−")


def _decimals(scale: float) -> int:
    """Decimals that show two digits of `scale`."""
    return min(6, max(0, 1 - math.floor(math.log10(scale))))


def _effect(link: LinkVerdict) -> str:
    if link.effect is None:
        return "–"
    if link.low is None or link.high is None:
        return number(link.effect, True)
    decimals = _decimals(link.high - link.low) if link.high > link.low else 4
    return f"{link.effect:+.{decimals}f} [{link.low:+.{decimals}f}, {link.high:+.{decimals}f}]".replace("-", "−")


@dataclasses.dataclass(frozen=True)
class _MetricRow:
    name: str
    direction: Direction | None
    cells: list[str]


def _metric_rows(verdict: Verdict) -> tuple[list[_MetricRow], bool]:
    """One row a metric; and whether some arm has a metric in fewer seeds than it finished."""
    rows, uneven = [], False
    for name in sorted({name for arm in verdict.arms for name in arm.metrics}):
        cells, direction = [], None
        for arm in verdict.arms:
            spread = arm.metrics.get(name)
            direction = direction or (spread.direction if spread else None)
            uneven |= spread is not None and spread.n != arm.finished
            cells.append(_spread(spread, arm))
        rows.append(_MetricRow(name, direction, cells))
    return rows, uneven


def _spread(spread: Spread | None, arm: ArmSummary, factor: float = 1.0) -> str:
    if spread is None:
        return "–"
    count = f" ({spread.n})" if spread.n != arm.finished else ""
    return plus_minus(spread.mean, spread.sd, factor) + count


def _budget_rows(verdict: Verdict) -> list[list[str]]:
    names = {"nonpad_tokens": "non-pad tokens", "flops": "FLOPs", "seconds": "seconds"}
    rows = []
    for name in BUDGETS:
        if any(name in arm.budgets for arm in verdict.arms):
            rows.append([names.get(name, name), *(_budget(name, arm.budgets.get(name)) for arm in verdict.arms)])
    for name in PARAMETERS:
        if any(name in arm.parameters for arm in verdict.arms):
            cells = (f"{arm.parameters[name]:,}" if name in arm.parameters else "–" for arm in verdict.arms)
            rows.append([f"parameters, {name}", *cells])
    return rows


def _budget(name: str, spread: Spread | None) -> str:
    if spread is None:
        return "–"
    if name == "flops":
        return f"{spread.mean:.3e}"
    if name == "seconds":
        return plus_minus(spread.mean, spread.sd)
    spread_text = f" ± {spread.sd:,.0f}" if spread.sd else ""
    return f"{spread.mean:,.0f}{spread_text}"


@dataclasses.dataclass(frozen=True)
class _Beside:
    """A table of the paper with our numbers in it."""

    source: Source
    columns: tuple[str, ...]
    rows: list[list[str]]
    notes: list[str]


def _columns(source: Source) -> tuple[str, ...]:
    """The paper's columns that we measure too."""
    numbers = source.numbers
    return tuple(column for column in numbers.metrics if column in numbers.measured_as) if numbers else ()


def _beside(claim: Claim, source: Source, verdict: Verdict) -> _Beside:
    numbers = source.numbers
    assert numbers is not None
    columns, rows = _columns(source), []
    fallbacks: dict[str, None] = {}
    for arm in verdict.arms:
        row = [arm.label]
        printed = numbers.arms.get(claim.arms[arm.arm].paper_name or "")
        for column in columns:
            candidates = numbers.measured_as[column]
            ours = next((name for name in candidates if name in arm.metrics), None)
            mark = ""
            if ours is not None and ours != candidates[0]:
                fallbacks[f"\\* `{ours}`, where the arm has no `{candidates[0]}`."] = None
                mark = "\\*"
            text = _spread(arm.metrics.get(ours or ""), arm, 100.0 if numbers.percent else 1.0)
            paper = printed[numbers.metrics.index(column)] if printed else None
            row.append(f"{text}{mark} ({'–' if paper is None else paper})")
        rows.append(row)
    return _Beside(source, columns, rows, list(fallbacks))


def _provenance_lines(verdict: Verdict) -> list[str]:
    lines = []
    for origin in verdict.provenance:
        commit = origin.get("commit")
        code = f"commit {commit[:12]}{' with uncommitted changes' if origin.get('dirty') else ''}" if commit else ""
        versions = ", ".join(f"{name} {version}" for name, version in origin.get("versions", {}).items())
        gpus = origin.get("gpu") or []
        machine = f"{origin.get('cpu')}, {origin.get('cores')} cores" + (f", {len(gpus)} × {gpus[0]}" if gpus else "")
        parts: list[Any] = [code, f"code {origin.get('code')}", versions, f"Python {origin.get('python')}"]
        parts += [machine, origin.get("platform"), origin.get("precision")]
        lines.append(f"Run with: {'; '.join(part for part in parts if part)}.")
    return list(dict.fromkeys(lines))


# Plot ----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Panel:
    """One metric: its comparisons on the left, its arms on the right."""

    metric: str
    direction: Direction | None
    links: list[LinkVerdict]
    arms: list[tuple[str, dict[int, float]]]
    """Label -> seed -> value."""
    constants: list[float]

    @property
    def rows(self) -> int:
        return max(len(self.links), len(self.arms), 1)


def _panels(claim: Claim, verdict: Verdict) -> list[_Panel]:
    groups: dict[str, list[PredictionVerdict]] = {}
    for prediction in verdict.predictions:
        groups.setdefault(prediction.metric, []).append(prediction)
    panels = []
    for metric, predictions in groups.items():
        links = [link for prediction in predictions for link in prediction.links]
        values: dict[str, dict[int, float]] = {}
        for link in links:
            values.setdefault(link.left, {}).update(zip(link.seeds, link.left_values, strict=True))
            if isinstance(link.right, str):
                values.setdefault(link.right, {}).update(zip(link.seeds, link.right_values, strict=True))
        arms = [(claim.arms[name].label, values[name]) for name in claim.arms if name in values]
        constants = sorted({link.right for link in links if isinstance(link.right, float)})
        panels.append(_Panel(metric, predictions[0].direction, links, arms, constants))
    return panels


def draw(claim: Claim, verdict: Verdict, path: Path) -> None:
    """Draw the forest plot: for every metric the effects with intervals and seeds, and beside them the arms."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(claim, verdict)
    settings: Any = {"font.family": "DejaVu Sans", "font.size": 9, "axes.edgecolor": _FAINT, "text.color": _INK}
    with matplotlib.rc_context(settings):
        # All lengths in inches; the label columns are as wide as their longest label.
        effect_labels = [_label(claim, link) for panel in panels for link in panel.links]
        arm_labels = [label for panel in panels for label, _ in panel.arms]
        first, second = (max([1.1, *(_WIDE * len(text) for text in texts)]) for texts in (effect_labels, arm_labels))
        heights = [0.45 * panel.rows + 0.95 for panel in panels]
        width, height = first + 4.4 + second + 3.1 + 0.75, sum(heights) + 1.1
        figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
        FigureCanvasAgg(figure)

        def write(x: float, y: float, text: str, **style: Any) -> None:
            figure.text(x / width, y / height, text, va="center", **style)

        plan = f"scale {verdict.scale}, seeds {seed_list(verdict.planned_seeds)}: {summary(verdict)}"
        write(0.25, height - 0.34, claim.title, fontsize=14, fontweight="bold")
        write(0.25, height - 0.68, plan, fontsize=10, color=_SOFT)
        top = height - 1.0
        for panel, size in zip(panels, heights, strict=True):
            bottom, extent = top - size + 0.62, size - 0.95
            write(0.25, bottom + extent + 0.13, panel.metric, fontweight="bold")
            left = first + 0.3
            box = (left / width, bottom / height, 4.4 / width, extent / height)
            _draw_effects(figure.add_axes(box), panel, claim)
            left += 4.4 + second + 0.1
            box = (left / width, bottom / height, 3.1 / width, extent / height)
            _draw_arms(figure.add_axes(box), panel)
            top -= size
        figure.savefig(path, metadata={"Software": None, "verdict": _digest(verdict)})


def _label(claim: Claim, link: LinkVerdict) -> str:
    right = claim.arms[link.right].label if isinstance(link.right, str) else f"{link.right:g}"
    return f"{claim.arms[link.left].label} − {right}"


def _bare(axes: "Axes", rows: int) -> None:
    axes.set_ylim(rows - 0.5, -0.5)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, color=_FAINT, labelcolor=_SOFT)
    axes.grid(axis="x", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.locator_params(axis="x", nbins=5)
    axes.ticklabel_format(axis="x", useOffset=False)


def _nothing(axes: "Axes", text: str) -> None:
    """Say that there is nothing to see, rather than number an axis that holds no value."""
    axes.set_xticks([])
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=8, color=_FAINT)


def _draw_effects(axes: "Axes", panel: _Panel, claim: Claim) -> None:
    """Intervals of left - right; the axis is turned where low is better, so that right is better for the left arm."""
    _bare(axes, panel.rows)
    axes.axvline(0, color=_INK, linewidth=1)
    for row, link in enumerate(panel.links):
        colour = OUTCOME_COLOURS[link.outcome]
        if link.margin is not None:
            axes.fill_betweenx([row - 0.38, row + 0.38], -link.margin, link.margin, color="#0072B2", alpha=0.12, lw=0)
        reference = link.right_values or [link.right] * link.n
        seeds = [a - float(b) for a, b in zip(link.left_values, reference, strict=True)]
        axes.plot(seeds, [row + 0.2] * len(seeds), "o", ms=4, mfc="white", mec=colour, mew=1, clip_on=False)
        if link.effect is not None and link.low is not None and link.high is not None:
            axes.plot([link.low, link.high], [row - 0.08] * 2, color=colour, lw=2.4, solid_capstyle="round")
            axes.plot([link.effect], [row - 0.08], "o", color=colour, ms=7)
        at: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
        axes.annotate(_label(claim, link), (0, row), (-5, 1), va="bottom", **at)
        found = f"{link.outcome}, n = {link.n}"
        axes.annotate(found, (0, row), (-5, 0), va="top", fontsize=8, fontweight="bold", color=colour, **at)
    axes.set_yticks([])
    axes.margins(x=0.08)
    if not any(link.n for link in panel.links):
        _nothing(axes, "no paired seeds yet")
    if panel.direction == "min":
        axes.invert_xaxis()
    axes.set_xlabel("difference, better for the first →", fontsize=8, color=_SOFT, labelpad=2)


def _draw_arms(axes: "Axes", panel: _Panel) -> None:
    """Every seed of every arm, paired seeds joined, means as bars."""
    _bare(axes, panel.rows)
    for constant in panel.constants:
        axes.axvline(constant, color=_INK, linewidth=1, linestyle=(0, (3, 2)))
    for seed in sorted({seed for _, values in panel.arms for seed in values}):
        points = [(values[seed], row) for row, (_, values) in enumerate(panel.arms) if seed in values]
        axes.plot([x for x, _ in points], [y for _, y in points], color=_FAINT, lw=0.8, alpha=0.7, zorder=1)
    for row, (_, values) in enumerate(panel.arms):
        axes.plot(list(values.values()), [row] * len(values), "o", ms=4, mfc="white", mec=_INK, mew=0.9, zorder=2)
        if values:
            mean = sum(values.values()) / len(values)
            axes.plot([mean, mean], [row - 0.3, row + 0.3], color=_INK, lw=2.4, solid_capstyle="round", zorder=3)
    axes.set_yticks(range(len(panel.arms)), [label for label, _ in panel.arms])
    axes.margins(x=0.12)
    if not any(values for _, values in panel.arms):
        _nothing(axes, "no values yet")
    if panel.direction == "min":
        axes.invert_xaxis()
    axes.set_xlabel(
        "value per arm, better →" if panel.direction else "value per arm", fontsize=8, color=_SOFT, labelpad=2
    )
