import dataclasses
import json
import re

import numpy as np
import pytest

from clozelab.claims.report import is_stale, plus_minus, readme, summary, write_report
from clozelab.claims.schema import Claim, find_claims
from clozelab.claims.verdict import judge
from clozelab.records import Metric, Record, read_records

PROVENANCE = {
    "commit": "0123456789abcdef0123",
    "dirty": True,
    "code": "c0de",
    "versions": {"clozelab": "0.1.0", "torch": "2.6.0"},
    "python": "3.11.7",
    "platform": "Linux x86_64",
    "cpu": "A CPU",
    "cores": 2,
    "gpu": ["G100", "G100"],
}
BUDGETS = {"steps": 1000, "tokens": 4e6, "nonpad_tokens": 3.9e6, "targets": 5e5, "flops": 1.25e14, "seconds": 61.5}
CLAIMS = {claim.id: claim for claim in find_claims()}


def records(claim: Claim, scale: str = "cpu", n: int = 5) -> list[Record]:
    """Made-up results of a claim: every metric that it asks of an arm, spread over seeds."""
    rng = np.random.default_rng(0)
    found = []
    for k, arm in enumerate(claim.arms):
        for seed in claim.planned_seeds(scale, n):
            metrics = {}
            for prediction in claim.predictions:
                if arm in prediction.relation.arms:
                    direction = "min" if prediction.metric.endswith("loss") else "max"
                    value = 0.5 + 0.04 * k + rng.normal(0, 0.01)
                    metrics[prediction.metric] = Metric(value, direction, 2000, prediction.metric)
            metrics.setdefault("heldout_mlm.accuracy", Metric(0.25, "max", 2000, "m"))
            metrics.setdefault("pairs.nsp.probe", Metric(0.625, "max", 2000, "m"))
            metrics.setdefault("pairs.sop.probe", Metric(0.515, "max", 2000, "m"))
            config = {"seed": seed, claim.varies[0].split(".")[0]: {claim.varies[0].split(".")[1]: arm}}
            parameters = {"unique": 1234567, "unshared": 4000000, "embedding": 800000}
            cell = f"{arm}-{seed}"
            found.append(
                Record(claim.id, arm, seed, scale, "finished", cell, config, PROVENANCE, BUDGETS, parameters, metrics)
            )
    return found


@pytest.fixture(params=sorted(CLAIMS))
def claim(request) -> Claim:
    return CLAIMS[request.param]


def test_equal_inputs_give_equal_bytes_and_the_order_of_records_is_no_input(tmp_path, claim):
    made = records(claim)
    for folder, given in (("one", made), ("two", made[::-1])):
        write_report(claim, judge(claim, given, "cpu"), tmp_path / folder)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["README.md", "plot.png", "verdict.json"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_a_report_is_stale_as_soon_as_anything_changed(tmp_path, claim):
    made = records(claim)
    verdict = judge(claim, made, "cpu")
    assert is_stale(claim, verdict, tmp_path)
    write_report(claim, verdict, tmp_path)
    assert not is_stale(claim, verdict, tmp_path)
    assert is_stale(claim, judge(claim, made[:-1], "cpu"), tmp_path)
    assert is_stale(dataclasses.replace(claim, says="Something else."), verdict, tmp_path)
    for name in ("README.md", "verdict.json", "plot.png"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(b"edited")
        assert is_stale(claim, verdict, tmp_path), name
        (tmp_path / name).write_bytes(content)
    assert not is_stale(claim, verdict, tmp_path)


def test_the_page_holds_what_a_reader_needs_to_check_it(claim):
    made = records(claim)
    verdict = judge(claim, made, "cpu")
    page = readme(claim, verdict)
    assert summary(verdict) in page
    for prediction in claim.predictions:
        assert f"### {prediction.id}" in page
        assert prediction.says in page
        assert prediction.basis in page
    for arm in claim.arms.values():
        assert arm.label in page
        assert " ".join(arm.overrides) in page
    for part in ("commit 0123456789ab with uncommitted changes", "torch 2.6.0", "A CPU, 2 cores", "2 × G100",
                 "1,234,567", "3,900,000", "1.250e+14", "61.5", f"clozelab run {claim.id} --scale cpu",
                 "None: every planned cell finished.", "Met by every finished cell."):  # fmt: skip
        assert part in page, part
    for source in claim.sources:
        for point in source.not_controlled:
            assert point in page
    for line in claim.regime:
        assert line in page
    assert "None" not in page.replace("None: every planned cell finished.", "")
    assert not re.search(r"\bnan\b|\{\{|\}\}", page)
    assert not re.search(r"\d{4}-\d\d-\d\d|\d\d:\d\d", page), "a date or a time"


def test_tables_are_whole(claim):
    page = readme(claim, judge(claim, records(claim), "cpu"))
    for table in re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE):
        widths = {line.count("|") for line in table.splitlines()}
        assert len(widths) == 1, table
        assert re.fullmatch(r"[|:-]+", table.splitlines()[1]), table


def test_the_matrix_of_albert_stands_beside_the_papers():
    claim = CLAIMS["sop-vs-nsp"]
    page = readme(claim, judge(claim, records(claim), "cpu"))
    section = page.partition("## Beside the paper: arXiv 1909.11942")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    assert rows[0] == ["trained as", "MLM acc", "NSP acc", "SOP acc"]
    paper = [[re.search(r"\(([\d.]+)\)$", cell).group(1) for cell in row[1:]] for row in rows[2:]]
    assert paper == [["54.9", "52.4", "53.3"], ["54.5", "90.5", "52.0"], ["54.0", "78.9", "86.5"]]
    assert [row[0] for row in rows[2:]] == ["MLM", "MLM+NSP", "MLM+SOP"]
    # Own heads where there are any, the probe (marked) elsewhere; percent as in the paper.
    assert rows[2][2].startswith("5") or rows[2][2].startswith("4")
    assert [["\\*" in cell for cell in row[1:]] for row in rows[2:]] == [
        [False, True, True],
        [False, False, True],
        [False, True, False],
    ]
    assert "`pairs.nsp.probe`, where the arm has no `pairs.nsp.own`" in section


@pytest.mark.parametrize("n", [0, 1, 2])
def test_a_report_of_few_or_no_seeds_is_drawn_and_decides_nothing(tmp_path, claim, n):
    made = [record for record in records(claim) if record.seed < n]
    verdict = judge(claim, made, "cpu")
    write_report(claim, verdict, tmp_path)
    assert set(verdict.counts) == {"inconclusive"}
    page = (tmp_path / "README.md").read_text()
    assert "- missing: " in page
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_diverged_seeds_and_unmatched_budgets_are_listed(tmp_path, claim):
    made = records(claim)
    made[0] = dataclasses.replace(
        made[0], metrics={name: dataclasses.replace(m, value=float("nan")) for name, m in made[0].metrics.items()}
    )
    made[-1] = dataclasses.replace(made[-1], budgets=BUDGETS | {"nonpad_tokens": 5e6})
    write_report(claim, judge(claim, made, "cpu"), tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert f"- diverged: {made[0].arm}, seed 0: not finite" in page
    assert "**Not met:**" in page
    assert "5,000,000, +28.2%" in page


def test_the_plot_is_a_picture_of_readable_size(tmp_path, claim):
    image = pytest.importorskip("matplotlib.image")
    write_report(claim, judge(claim, records(claim), "cpu"), tmp_path)
    pixels = image.imread(tmp_path / "plot.png")
    assert 1200 <= pixels.shape[1] <= 2400
    # Nothing touches the border, so no label is cut off.
    border = np.concatenate([pixels[:3].reshape(-1, 4), pixels[:, :3].reshape(-1, 4), pixels[:, -3:].reshape(-1, 4)])
    assert np.all(border == 1.0)


@pytest.mark.parametrize(
    ("mean", "sd", "factor", "text"),
    [
        (0.51234, 0.00412, 1, "0.5123 ± 0.0041"),
        (0.51234, 0.0412, 100, "51.2 ± 4.1"),
        (61.53, 12.0, 1, "62 ± 12"),
        (-1.5, 0.1, 1, "−1.50 ± 0.10"),
        (0.5, 0.0, 1, "0.5000 ± 0.0000"),
        (0.51234, None, 1, "0.5123"),
    ],
)
def test_means_show_the_decimals_that_their_spread_warrants(mean, sd, factor, text):
    assert plus_minus(mean, sd, factor) == text


def test_published_reports_are_those_of_their_evidence():
    """A README, plot or verdict that was not generated again after its evidence or its claim changed is an error."""
    for claim in CLAIMS.values():
        published = claim.folder / "verdict.json"
        if published.is_file():
            scale = json.loads(published.read_text())["scale"]
            found, folder = read_records(claim.evidence(scale)), claim.evidence(scale).parent
            verdict = judge(claim, found, scale, scores=folder)
            assert not is_stale(claim, verdict, claim.folder), f"run `clozelab publish {claim.id}`"
