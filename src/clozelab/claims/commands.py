"""What the commands of the verdict island do: judge records, show the verdict, keep evidence."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from clozelab import records
from clozelab.claims.report import is_stale, write_report
from clozelab.claims.schema import SCALES, Claim, load_claim, resolve_claim
from clozelab.claims.verdict import judge, verdict_text

SCORES = "scores"


def present(claim: Claim, found: Sequence[records.Record], scale: str, folder: Path) -> None:
    """Judge records of a run tree against the seeds that the scale plans, print the verdict, keep the report."""
    print(verdict_text(judge(claim, found, scale)))
    write_report(claim, found, scale, folder)
    print(f"report: {folder / 'README.md'}")


def write_evidence(claim: Claim, scale: str, done: Sequence[tuple[records.Record, Path]]) -> None:
    """Append finished cells, with their per-example scores, to the claim's evidence and write its report.

    Raises:
        ValueError: the evidence holds other results of the same cells, or cells of another configuration; nothing was
            written.
    """
    claim = _publishable(claim)
    evidence = claim.evidence(scale)
    before = records.read_records(evidence)
    known = {record.cell for record in before}
    # Judged together first: evidence is append-only, so what does not fit must not get in.
    judge(claim, [*before, *(record for record, _ in done if record.cell not in known)], scale)
    added = 0
    for record, directory in done:
        if record.scores is not None:
            target = evidence.parent / SCORES / f"{record.cell}.npz"
            _copy(directory / record.scores.path, target)
            record.scores = records.Scores(path=f"{SCORES}/{target.name}", sha256=record.scores.sha256)
        added += records.append_record(evidence, record)
    # One report a claim: that of the largest scale with evidence.
    largest = [name for name in SCALES if name in claim.scales and claim.evidence(name).exists()][-1]
    found = records.read_records(claim.evidence(largest))
    verdict = write_report(claim, found, largest, claim.folder, scores=evidence.parent)
    print(verdict_text(verdict))
    print(f"{added} record(s) added to {evidence}; report: {claim.folder / 'README.md'}")


def _publishable(claim: Claim) -> Claim:
    """The claim in a folder that is the user's: one inside the installed package is first copied to ./experiments."""
    package = Path(__file__).resolve().parents[1]
    if package not in claim.folder.parents:
        return claim
    own = Path.cwd() / "experiments" / claim.id
    own.mkdir(parents=True, exist_ok=True)
    for file in claim.folder.iterdir():
        if file.is_file() and not (own / file.name).exists():
            shutil.copyfile(file, own / file.name)
    if (claim.folder / "evidence").is_dir() and not (own / "evidence").exists():
        shutil.copytree(claim.folder / "evidence", own / "evidence")
    return load_claim(own)


def _copy(source: Path, target: Path) -> None:
    """Copy a file so that the target is whole or not there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(".part")
    shutil.copyfile(source, temporary)
    temporary.replace(target)


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
        print(verdict_text(judge(claim, records.read_records(evidence), chosen, scores=evidence.parent)))
    largest = [s for s in claim.scales if claim.evidence(s).exists()][-1]
    evidence = claim.evidence(largest)
    if is_stale(claim.folder, claim, records.read_records(evidence), largest, scores=evidence.parent):
        print(
            f"note: {claim.folder / 'README.md'} was generated from something else; "
            f"`clozelab publish {claim.id} --scale {largest}` writes it again"
        )
    return 0
