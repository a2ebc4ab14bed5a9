"""What the commands of the verdict island do: judge records, show the verdict, keep evidence."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from clozelab import records
from clozelab.claims.report import is_stale, write_report
from clozelab.claims.schema import SCALES, Claim, load_claim, resolve_claim
from clozelab.claims.verdict import Verdict, judge, verdict_text

SCORES = "scores"


def present(claim: Claim, found: Sequence[records.Record], scale: str, folder: Path) -> None:
    """Judge records of a run tree against the seeds that the scale plans, print the verdict, keep the report."""
    verdict = judge(claim, found, scale)
    print(verdict_text(verdict))
    write_report(claim, verdict, folder)
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
    verdict = _judge_evidence(claim, _published(claim)[-1])
    write_report(claim, verdict, claim.folder)
    print(verdict_text(verdict))
    print(f"{added} record(s) added to {evidence}; report: {claim.folder / 'README.md'}")


def _published(claim: Claim) -> list[str]:
    """The scales with evidence, the largest last: a claim has one report, and it is that one's."""
    return [name for name in SCALES if name in claim.scales and claim.evidence(name).exists()]


def _judge_evidence(claim: Claim, scale: str) -> Verdict:
    evidence = claim.evidence(scale)
    return judge(claim, records.read_records(evidence), scale, scores=evidence.parent)


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
    published = _published(claim)
    scales = [scale] if scale else published
    if not scales or scales[0] not in published:
        where = claim.evidence(scales[0]) if scales else claim.folder / "evidence"
        raise ValueError(
            f"no evidence at {where}; `clozelab run {claim.id}` makes records, `clozelab publish` keeps them"
        )
    verdicts: dict[str, Verdict] = {}
    for chosen in scales:
        verdicts[chosen] = _judge_evidence(claim, chosen)
        print(verdict_text(verdicts[chosen]))
    largest = published[-1]
    if is_stale(claim, verdicts.get(largest) or _judge_evidence(claim, largest), claim.folder):
        print(
            f"note: {claim.folder / 'README.md'} was generated from something else; "
            f"`clozelab publish {claim.id} --scale {largest}` writes it again"
        )
    return 0
