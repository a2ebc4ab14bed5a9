"""Every claim that ships composes at every scale, passes its guard, and has the report that its evidence gives."""

from pathlib import Path

import pytest

from clozelab import records
from clozelab.claims.report import is_stale
from clozelab.claims.schema import Claim, load_claim
from clozelab.claims.verdict import judge
from clozelab.running.claim_run import make_plan

CLAIMS = [load_claim(path) for path in sorted((Path(__file__).parents[2] / "experiments").glob("*/claim.yaml"))]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_every_scale_composes_and_passes_the_guard(claim: Claim, tmp_path: Path) -> None:
    for scale in claim.scales.values():
        plan = make_plan(claim, scale.name, tmp_path)
        assert len({cell.id for cell in plan.cells}) == len(claim.arms) * scale.seeds
        assert not plan.records()


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_the_report_is_what_the_evidence_gives(claim: Claim) -> None:
    published = [scale for scale in claim.scales if claim.evidence(scale).exists()]
    for scale in published[:1]:
        evidence = claim.evidence(scale)
        found = records.read_records(evidence)
        for record in found:
            assert record.scores is not None
            records.read_scores(evidence.parent / record.scores.path, record.scores.sha256)
        assert not is_stale(claim, judge(claim, found, scale, scores=evidence.parent), claim.folder)
