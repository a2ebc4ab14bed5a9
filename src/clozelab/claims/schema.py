"""A claim as data: `experiments/<id>/claim.yaml` read into dataclasses, checked key by key.

Reading costs nothing but PyYAML, because `clozelab claims` must list every claim in a moment. Every error names the
file and the key and says what to write instead.

Relations (the whole grammar; names are arms, M and numbers are in the metric's unit):

    a > b            the metric's value of a is above that of b. It says *larger*, never "better": a loss that should
    a < b            fall is written `a < b`
    a > b > c        every adjacent pair, all with the same sign
    a = b within M   equivalent: the difference lies inside (-M, M)
    a >= b - M       not worse by more than M, for a metric that should be high
    a <= b + M       the same for a metric that should be low

The right-hand side may be a number: `mlm_sop > 0.5`, `mlm_nsp = 0.5 within 0.03`.
"""

import dataclasses
import difflib
import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from clozelab.paths import claim_roots

SCALES = ("smoke", "cpu", "gpu", "paper")
MATCHABLE = ("steps", "tokens", "nonpad_tokens", "targets", "flops", "seconds")


@dataclasses.dataclass(frozen=True)
class Link:
    """One comparison: `left sign right`, where right is an arm or a number."""

    left: str
    sign: str
    """One of >  <  =  >=  <=."""
    right: str | float
    margin: float = 0.0
    """M of `=`, `>=` and `<=`; 0 for the strict signs."""

    def __str__(self) -> str:
        right = self.right if isinstance(self.right, str) else f"{self.right:g}"
        tail = {"=": f" within {self.margin:g}", ">=": f" - {self.margin:g}", "<=": f" + {self.margin:g}"}
        return f"{self.left} {self.sign} {right}{tail.get(self.sign, '')}"

    @property
    def arms(self) -> tuple[str, ...]:
        return (self.left, self.right) if isinstance(self.right, str) else (self.left,)


@dataclasses.dataclass(frozen=True)
class Relation:
    """A parsed relation: one link, or the adjacent links of a chain."""

    text: str
    links: tuple[Link, ...]

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(arm for link in self.links for arm in link.arms))


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A table of the paper, and which of our metrics stand beside its columns."""

    metrics: tuple[str, ...]
    arms: dict[str, tuple[float | str | None, ...]]
    """By the paper's name for the arm; text where a cell holds two numbers ("88.6/81.5")."""
    measured_as: dict[str, tuple[str, ...]]
    """Column -> our metrics; the first one that an arm has is shown."""
    percent: bool
    """The paper prints percent where ours are fractions."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the claim was published, what it printed and what it left uncontrolled."""

    paper: str
    arxiv: str
    year: int
    where: str
    numbers: Numbers | None
    not_controlled: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Arm:
    """One level of the factor."""

    name: str
    overrides: tuple[str, ...]
    label: str
    paper_name: str | None


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A testable sentence: on this metric, these arms stand in this relation."""

    id: str
    says: str
    metric: str
    relation: Relation
    margin: float | None
    """For strict signs: differences inside (-margin, margin) are too small to matter (equivalence)."""
    paper: dict[str, Any]
    """What the paper printed for this comparison; empty where it printed nothing."""
    basis: str
    """Why we predict it: the paper's own result, a consequence of it, or our reading of the regime."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """A size at which the claim is run."""

    name: str
    overrides: tuple[str, ...]
    seeds: int
    """How many of the claim's seeds are planned, from the front."""
    says: str
    expected_time: str


@dataclasses.dataclass(frozen=True)
class Claim:
    """A published statement, as data."""

    id: str
    title: str
    says: str
    sources: tuple[Source, ...]
    arms: dict[str, Arm]
    control: str
    varies: tuple[str, ...]
    """Dotted config keys (and everything below them) in which arms may differ."""
    matched: dict[str, float]
    """Budget -> relative tolerance within which every arm must agree with the control."""
    yardsticks: dict[str, str]
    """Metric (or its beginning) -> what it measures here and which of the paper's measures it stands in for."""
    regime: tuple[str, ...]
    """Where this experiment's conditions differ from the paper's, written before any run."""
    predictions: tuple[Prediction, ...]
    seeds: tuple[int, ...]
    scales: dict[str, Scale]
    folder: Path

    def evidence(self, scale: str) -> Path:
        """The published records of a scale (the file need not exist)."""
        return self.folder / "evidence" / f"{self.scale(scale).name}.jsonl"

    def scale(self, name: str) -> Scale:
        """The scale of that name; ValueError with the names that exist."""
        if name not in self.scales:
            raise ValueError(f"claim {self.id} has no scale {name!r}; it has {', '.join(self.scales)}")
        return self.scales[name]

    def planned_seeds(self, scale: str, n: int | None = None) -> tuple[int, ...]:
        """The first n seeds of the claim (default: as many as the scale plans).

        Raises:
            ValueError: more seeds asked for than the claim lists, or fewer than one.
        """
        wanted = self.scale(scale).seeds if n is None else n
        if not 1 <= wanted <= len(self.seeds):
            raise ValueError(
                f"claim {self.id} lists {len(self.seeds)} seeds, {wanted} were asked for; add seeds to {self.folder}"
            )
        return self.seeds[:wanted]

    @property
    def links(self) -> int:
        """How many comparisons the predictions make together: the size of the Holm family."""
        return sum(len(prediction.relation.links) for prediction in self.predictions)


# Relations -----------------------------------------------------------------------------------------------------------

_NAME = r"[A-Za-z_][\w.-]*"
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_OPERAND = f"{_NUMBER}|{_NAME}"
_EQUAL = re.compile(rf"({_NAME})\s*=\s*({_OPERAND})\s+within\s+({_NUMBER})")
_BOUNDED = re.compile(rf"({_NAME})\s*(>=|<=)\s*({_OPERAND})\s+([+-])\s+({_NUMBER})")
_CHAIN = re.compile(rf"({_OPERAND})((?:\s*[<>]\s*(?:{_OPERAND}))+)")


def parse_relation(text: str) -> Relation:
    """Parse a relation of the grammar above.

    Raises:
        ValueError: not in the grammar, mixed signs in a chain, a number anywhere but last, or a margin that is not
            positive.
    """
    text = " ".join(text.split())
    if match := _EQUAL.fullmatch(text):
        left, right, margin = match.groups()
        return Relation(text, (Link(left, "=", _operand(right), _positive(margin, text)),))
    if match := _BOUNDED.fullmatch(text):
        left, sign, right, operator, margin = match.groups()
        if (sign, operator) not in ((">=", "-"), ("<=", "+")):
            raise ValueError(f"relation {text!r}: write 'a >= b - M' or 'a <= b + M'")
        return Relation(text, (Link(left, sign, _operand(right), _positive(margin, text)),))
    if _CHAIN.fullmatch(text):
        signs = set(re.findall(r"[<>]", text))
        if len(signs) != 1:
            raise ValueError(f"relation {text!r} mixes < and >; a chain keeps one sign")
        names = [_operand(part.strip()) for part in re.split(r"[<>]", text)]
        sign = signs.pop()
        links = []
        for left_operand, right_operand in itertools.pairwise(names):
            if not isinstance(left_operand, str):
                raise ValueError(f"relation {text!r}: a number may only stand last, as in 'a > 0.5'")
            if left_operand == right_operand:
                raise ValueError(f"relation {text!r} compares {left_operand} with itself")
            links.append(Link(left_operand, sign, right_operand))
        return Relation(text, tuple(links))
    raise ValueError(
        f"relation {text!r} is not understood; write 'a > b', 'a < b', 'a > b > c', 'a = b within M', 'a >= b - M' or "
        "'a <= b + M', where the right side may be a number"
    )


def _operand(text: str) -> str | float:
    return float(text) if re.fullmatch(_NUMBER, text) else text


def _positive(text: str, relation: str) -> float:
    value = float(text)
    if value <= 0:
        raise ValueError(f"relation {relation!r}: the margin must be above 0")
    return value


# Reading -------------------------------------------------------------------------------------------------------------


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The safe loader, refusing a key given twice: YAML itself would keep the last one without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


class _Node:
    """A mapping of the file that knows its place, so that every complaint can name file and key."""

    def __init__(self, value: Any, file: Path, place: str, known: Iterable[str]) -> None:
        self.file, self.place = file, place
        if not isinstance(value, dict):
            self.fail("", f"must be a mapping, is {_kind(value)}")
        self.fields: dict[str, Any] = value
        known = tuple(known)
        for key in value:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
                self.fail(str(key), f"is not a known key; {hint}")

    def fail(self, key: str, problem: str) -> NoReturn:
        place = ".".join(part for part in (self.place, key) if part)
        raise ValueError(f"{self.file}: {place + ' ' if place else ''}{problem}")

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The value of a key, of the kind asked for; without a default the key must be there."""
        if key not in self.fields:
            if default is ...:
                self.fail(key, "is missing")
            return default
        value = self.fields[key]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            hint = " (YAML reads 1e-3 as text: write 1.0e-3)" if isinstance(value, str) and float in kinds else ""
            self.fail(key, f"must be {' or '.join(map(_kind_name, kinds))}, is {_kind(value)}{hint}")
        return value

    def texts(self, key: str, default: Any = ...) -> tuple[str, ...]:
        values = self.get(key, list, default)
        for index, value in enumerate(values):
            if not isinstance(value, str):
                self.fail(f"{key}[{index}]", f"must be text, is {_kind(value)}; quote it if YAML reads it otherwise")
        return tuple(values)

    def text_map(self, key: str) -> dict[str, str]:
        values = self.get(key, dict, {})
        for name, value in values.items():
            if not isinstance(name, str) or not isinstance(value, str):
                self.fail(f"{key}.{name}", f"must be text, is {_kind(value)}")
        return dict(values)


def _kind_name(kind: type) -> str:
    names = {
        str: "text",
        int: "a whole number",
        float: "a number",
        list: "a list",
        dict: "a mapping",
        bool: "yes or no",
    }
    return "yes or no" if kind is bool else names.get(kind, kind.__name__)


def _kind(value: Any) -> str:
    return "empty" if value is None else f"{_kind_name(type(value))} ({value!r})"


def load_claim(path: Path) -> Claim:
    """Read and check a claim.yaml (or the folder that holds one).

    Raises:
        ValueError: anything that is not as this module describes, naming file, key and the way out.
        FileNotFoundError: there is no such file.
    """
    file = path / "claim.yaml" if path.is_dir() else path
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from None
    fields = [field.name for field in dataclasses.fields(Claim) if field.name != "folder"]
    node = _Node(content, file, "", fields)

    name = node.get("id", str)
    if file.name == "claim.yaml" and file.resolve().parent.name != name:
        node.fail("id", f"is {name!r} but the folder is called {file.resolve().parent.name!r}; give both one name")
    arms = _arms(node)
    control = node.get("control", str)
    if control not in arms:
        node.fail("control", f"is {control!r}, which is no arm; use one of {', '.join(arms)}")
    varies = node.texts("varies")
    if not varies:
        node.fail("varies", "is empty; name the config keys in which the arms may differ")
    seeds = _seeds(node)
    return Claim(
        id=name,
        title=node.get("title", str),
        says=node.get("says", str).strip(),
        sources=_sources(node, arms),
        arms=arms,
        control=control,
        varies=varies,
        matched=_matched(node),
        yardsticks=node.text_map("yardsticks"),
        regime=node.texts("regime", []),
        predictions=_predictions(node, arms),
        seeds=seeds,
        scales=_scales(node, seeds),
        folder=file.resolve().parent,
    )


def _arms(node: _Node) -> dict[str, Arm]:
    arms = {}
    for name, value in node.get("arms", dict).items():
        if not isinstance(name, str) or not re.fullmatch(_NAME, name):
            node.fail(f"arms.{name}", "must be a name of letters, digits, _ and -, starting with a letter")
        arm = _Node(value, node.file, f"arms.{name}", ("overrides", "label", "paper_name"))
        paper_name = arm.get("paper_name", str, None)
        arms[name] = Arm(name, arm.texts("overrides"), arm.get("label", str, name), paper_name)
    if len(arms) < 2:
        node.fail("arms", "needs at least two arms: a claim compares")
    return arms


def _seeds(node: _Node) -> tuple[int, ...]:
    seeds = node.get("seeds", list)
    if not seeds:
        node.fail("seeds", "is empty; list the seeds in the order in which scales take them")
    for index, seed in enumerate(seeds):
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            node.fail(f"seeds[{index}]", f"must be a whole number from 0, is {_kind(seed)}")
    if twice := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        node.fail("seeds", f"lists {', '.join(map(str, twice))} more than once; every seed counts once")
    return tuple(seeds)


def _matched(node: _Node) -> dict[str, float]:
    matched = _Node(node.get("matched", dict, {}), node.file, "matched", MATCHABLE)
    tolerances = {key: matched.get(key, float) for key in matched.fields}
    for key, tolerance in tolerances.items():
        if not 0 <= tolerance < 1:
            matched.fail(key, f"is a relative tolerance in [0, 1), is {tolerance}")
    return tolerances


def _sources(node: _Node, arms: Mapping[str, Arm]) -> tuple[Source, ...]:
    sources = []
    for index, value in enumerate(node.get("sources", list)):
        known = ("paper", "arxiv", "year", "where", "numbers", "not_controlled")
        source = _Node(value, node.file, f"sources[{index}]", known)
        sources.append(
            Source(
                paper=source.get("paper", str),
                arxiv=source.get("arxiv", str),
                year=source.get("year", int),
                where=source.get("where", str),
                numbers=_numbers(source, arms) if "numbers" in source.fields else None,
                not_controlled=source.texts("not_controlled", []),
            )
        )
    if not sources:
        node.fail("sources", "is empty; a claim was published somewhere")
    return tuple(sources)


def _numbers(source: _Node, arms: Mapping[str, Arm]) -> Numbers:
    known = ("metrics", "arms", "measured_as", "percent")
    numbers = _Node(source.get("numbers", dict), source.file, f"{source.place}.numbers", known)
    metrics = numbers.texts("metrics")
    rows: dict[str, tuple[float | str | None, ...]] = {}
    for name, row in numbers.get("arms", dict).items():
        if not isinstance(row, list) or not all(
            value is None or (isinstance(value, str | int | float) and not isinstance(value, bool)) for value in row
        ):
            numbers.fail(f"arms.{name}", f"must be a list of numbers, is {_kind(row)}")
        if len(row) != len(metrics):
            numbers.fail(f"arms.{name}", f"has {len(row)} values for {len(metrics)} metrics; use null for a gap")
        rows[str(name)] = tuple(row)
    beside: dict[str, tuple[str, ...]] = {}
    for column, ours in numbers.get("measured_as", dict, {}).items():
        if column not in metrics:
            numbers.fail(f"measured_as.{column}", f"is no column; the columns are {', '.join(metrics)}")
        beside[column] = (ours,) if isinstance(ours, str) else tuple(ours)
    if beside and not any(arm.paper_name in rows for arm in arms.values()):
        numbers.fail("arms", "matches no arm; set `paper_name` of an arm to the paper's name for it")
    return Numbers(metrics, rows, beside, numbers.get("percent", bool, False))


def _predictions(node: _Node, arms: Mapping[str, Arm]) -> tuple[Prediction, ...]:
    predictions: list[Prediction] = []
    for index, value in enumerate(node.get("predictions", list)):
        known = ("id", "says", "metric", "relation", "margin", "paper", "basis")
        item = _Node(value, node.file, f"predictions[{index}]", known)
        try:
            relation = parse_relation(item.get("relation", str))
        except ValueError as error:
            item.fail("relation", str(error).removeprefix("relation "))
        for arm in relation.arms:
            if arm not in arms:
                item.fail("relation", f"{relation.text!r} names {arm!r}, which is no arm; use {', '.join(arms)}")
        margin = item.get("margin", float, None)
        if margin is not None and relation.links[0].sign not in "<>":
            item.fail("margin", f"does not go with {relation.text!r}, which has a margin of its own; remove it")
        if margin is not None and margin <= 0:
            item.fail("margin", f"must be above 0, is {margin}")
        name = item.get("id", str)
        if any(name == other.id for other in predictions):
            item.fail("id", f"{name!r} is used twice; every prediction has its own")
        predictions.append(
            Prediction(
                id=name,
                says=item.get("says", str).strip(),
                metric=item.get("metric", str),
                relation=relation,
                margin=margin,
                paper=dict(item.get("paper", dict, {})),
                basis=item.get("basis", str).strip(),
            )
        )
    if not predictions:
        node.fail("predictions", "is empty; a claim without a prediction cannot be judged")
    return tuple(predictions)


def _scales(node: _Node, seeds: tuple[int, ...]) -> dict[str, Scale]:
    scales_node = _Node(node.get("scales", dict), node.file, "scales", SCALES)
    scales = {}
    for name, value in scales_node.fields.items():
        scale = _Node(value, node.file, f"scales.{name}", ("overrides", "seeds", "says", "expected_time"))
        n = scale.get("seeds", int)
        if not 1 <= n <= len(seeds):
            scale.fail("seeds", f"is {n}, the claim lists {len(seeds)}; ask for 1 to {len(seeds)} or list more")
        says, time = scale.get("says", str).strip(), scale.get("expected_time", str)
        scales[name] = Scale(name, scale.texts("overrides"), n, says, time)
    if not scales:
        scales_node.fail("", f"is empty; give at least one of {', '.join(SCALES)}")
    return scales


# Finding -------------------------------------------------------------------------------------------------------------


def find_claims(roots: Iterable[Path] | None = None, broken: list[str] | None = None) -> list[Claim]:
    """All claims under the roots (default: `claim_roots()`), by id. Where two roots hold one id the first root wins.

    Args:
        broken: takes the complaints about claims that cannot be read; without it the first one is raised.
    """
    found: dict[str, Path] = {}
    for root in claim_roots() if roots is None else roots:
        for file in sorted(root.glob("*/claim.yaml")):
            found.setdefault(file.parent.name, file)
    claims = []
    for name in sorted(found):
        try:
            claims.append(load_claim(found[name]))
        except ValueError as error:
            if broken is None:
                raise
            broken.append(str(error))
    return claims


def resolve_claim(name: str, roots: Iterable[Path] | None = None) -> Claim:
    """The claim of that id, or at that path (a claim.yaml or its folder).

    Raises:
        ValueError: there is none, with the names that exist.
    """
    roots = claim_roots() if roots is None else list(roots)
    for root in roots:
        if (root / name / "claim.yaml").is_file():
            return load_claim(root / name / "claim.yaml")
    path = Path(name)
    if path.is_file() or (path / "claim.yaml").is_file():
        return load_claim(path)
    known = sorted({file.parent.name for root in roots for file in root.glob("*/claim.yaml")})
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known claims: {', '.join(known) or 'none'}"
    raise ValueError(f"no claim {name!r}; {hint}")
