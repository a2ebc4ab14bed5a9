"""What the commands of the verdict island do: judge records, show the verdict, keep evidence."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from clozelab import records
from clozelab.claims.report import is_stale, write_report
from clozelab.claims.schema import Claim, resolve_claim
from clozelab.claims.verdict import judge, verdict_text

SCORES = "scores"


def present(claim: Claim, found: Sequence[records.Record], scale: str, folder: Path, seeds: Sequence[int]) -> None:
    """Judge records of a run tree against the seeds that were planned, print the verdict, keep the report in `folder`."""
    verdict = write_report(claim, found, scale, folder, seeds=seeds)
    print(verdict_text(verdict))
    print(f"report: {folder / 'README.md'}")


def write_evidence(claim: Claim, scale: str, done: Sequence[tuple[records.Record, Path]]) -> None:
    """Append finished cells, with their per-example scores, to the claim's evidence and write its report.

    Raises:
        ValueError: the evidence holds another result of one of the cells; nothing of that cell was written.
    """
    evidence = claim.evidence(scale)
    added = 0
    for record, directory in done:
        if record.scores is not None:
            target = evidence.parent / SCORES / f"{record.cell}.npz"
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                shutil.copyfile(directory / record.scores.path, target)
            record.scores = records.Scores(path=f"{SCORES}/{target.name}", sha256=record.scores.sha256)
        added += records.append_record(evidence, record)
    verdict = write_report(claim, records.read_records(evidence), scale, claim.folder, scores=evidence.parent)
    print(verdict_text(verdict))
    print(f"{added} record(s) added to {evidence}; report: {claim.folder / 'README.md'}")


def verdict(name: str, scale: str | None) -> int:
    """Judge a claim again from its published evidence; says so if the generated README is not what they give.

    Raises:
        ValueError: there is no evidence, or it cannot be read.
    """
    claim = resolve_claim(name)
    scales = [scale] if scale else [s for s in claim.scales if claim.evidence(s).exists()]
    if not scales or not claim.evidence(scales[0]).exists():
        where = claim.evidence(scales[0]) if scales else claim.folder / "evidence"
        raise ValueError(
            f"no evidence at {where}; `clozelab run {claim.id}` makes records, `clozelab publish` keeps them"
        )
    for chosen in scales:
        evidence = claim.evidence(chosen)
        found = records.read_records(evidence)
        print(verdict_text(judge(claim, found, chosen, scores=evidence.parent)))
        if is_stale(claim.folder, claim, found, chosen, scores=evidence.parent):
            print(
                f"note: {claim.folder / 'README.md'} was generated from something else; `clozelab publish {claim.id}`"
            )
    return 0
