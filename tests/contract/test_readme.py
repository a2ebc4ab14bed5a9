"""What the README shows is what the project gives: its verdict, its groups, its links."""

import re
from pathlib import Path

import pytest

from clozelab import records
from clozelab.claims.schema import load_claim
from clozelab.claims.verdict import judge, verdict_text
from clozelab.options import discover, registered

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_verdict_shown_is_that_of_the_evidence() -> None:
    claim = load_claim(ROOT / "experiments" / "static-vs-dynamic-masking")
    shown = README.partition("```\nSUPPORTED")[2].partition("```")[0]
    evidence = claim.evidence("cpu")  # with its per-example scores, as `clozelab verdict` reads it
    given = verdict_text(judge(claim, records.read_records(evidence), "cpu", scores=evidence.parent))
    assert shown.strip()
    assert shown in given


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("group", ["budget", "tracker", "optimizer", "schedule", "trainer", "evaluation"])
def test_every_option_of_a_group_is_named(group: str) -> None:
    discover()
    for name in registered(group):
        assert f"`{name}`" in README, (group, name)
