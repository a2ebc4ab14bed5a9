"""The list of claims: what each says, where it was published, at which scales it can be run, and the verdict so far."""

import json
import textwrap
from collections.abc import Iterable

from clozelab.claims.schema import Claim, find_claims


def list_claims(claims: Iterable[Claim] | None = None) -> str:
    """A paragraph a claim; reads YAML and generated verdicts only, computes nothing."""
    paragraphs = []
    broken: list[str] = []
    for claim in find_claims(broken=broken) if claims is None else claims:
        papers = "; ".join(f"{source.paper} ({source.year}), {source.where}" for source in claim.sources)
        scales = ", ".join(
            f"{scale.name} ({len(claim.arms) * scale.seeds} cells, {scale.expected_time})"
            for scale in claim.scales.values()
        )
        lines = {
            "says": claim.says,
            "source": papers,
            "arms": ", ".join(name + " (control)" * (name == claim.control) for name in claim.arms),
            "scales": scales,
            "verdict": _verdict(claim),
        }
        body = "\n".join(
            textwrap.fill(text, 110, initial_indent=f"  {label + ':':9}", subsequent_indent=" " * 11)
            for label, text in lines.items()
        )
        paragraphs.append(f"{claim.id}\n{body}")
    paragraphs += [f"unreadable: {problem}" for problem in broken]
    return "\n\n".join(paragraphs) or "no claims found; an experiments/ folder holds them"


def _verdict(claim: Claim) -> str:
    path = claim.folder / "verdict.json"
    if not path.is_file():
        return "none yet"
    try:
        verdict = json.loads(path.read_text(encoding="utf-8"))
        outcomes = "; ".join(f"{found['relation']}: {found['outcome']}" for found in verdict["predictions"])
        return f"at scale {verdict['scale']}: {outcomes}"
    except (ValueError, KeyError, TypeError):
        return f"unreadable: {path} is damaged; `clozelab publish` writes it again"
