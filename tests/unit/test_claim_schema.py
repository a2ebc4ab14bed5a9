import copy
from pathlib import Path

import pytest
import yaml

from clozelab.claims.schema import (
    MATCHABLE,
    Link,
    find_claims,
    load_claim,
    parse_relation,
    resolve_claim,
)
from clozelab.paths import claim_roots
from clozelab.records import BUDGETS

VALID = {
    "id": "a-claim",
    "title": "A beats B",
    "says": "A is better than B.",
    "sources": [
        {
            "paper": "P",
            "arxiv": "1234.56789",
            "year": 2019,
            "where": "Table 1",
            "numbers": {
                "metrics": ["F1", "acc"],
                "arms": {"the a": [81.5, "88.6/81.5"], "the c": [80, None]},
                "measured_as": {"acc": ["pairs.own", "pairs.probe"], "F1": "heldout.accuracy"},
                "percent": True,
            },
            "not_controlled": ["one run"],
        }
    ],
    "arms": {
        "a": {"overrides": ["x=1"], "label": "A", "paper_name": "the a"},
        "b": {"overrides": ["x=2"]},
        "c": {"overrides": []},
    },
    "control": "c",
    "varies": ["x"],
    "matched": {"nonpad_tokens": 0.01, "steps": 0},
    "yardsticks": {"pairs": "what it measures"},
    "regime": ["small"],
    "predictions": [
        {
            "id": "p",
            "says": "s",
            "metric": "m.n",
            "relation": "a > b > c",
            "margin": 0.1,
            "paper": {"a": 1},
            "basis": "b",
        }
    ],
    "seeds": [5, 3, 0],
    "scales": {"smoke": {"overrides": ["steps=1"], "seeds": 2, "says": "s", "expected_time": "1 s"}},
}


def write(folder: Path, content: object) -> Path:
    path = folder / "a-claim" / "claim.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return path


def changed(place: str, value: object) -> dict:
    """VALID with the value at a dotted place replaced (... removes it)."""
    content = copy.deepcopy(VALID)
    node = content
    *parents, last = place.split("/")
    for key in parents:
        node = node[int(key)] if isinstance(node, list) else node[key]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return content


def test_a_claim_is_read_whole(tmp_path):
    claim = load_claim(write(tmp_path, VALID))
    assert claim == load_claim(tmp_path / "a-claim")
    assert claim.arms["a"].overrides == ("x=1",)
    assert (claim.arms["b"].label, claim.arms["b"].paper_name) == ("b", None)
    assert claim.matched == {"nonpad_tokens": 0.01, "steps": 0.0}
    numbers = claim.sources[0].numbers
    assert numbers.arms["the a"] == (81.5, "88.6/81.5")
    assert numbers.measured_as == {"acc": ("pairs.own", "pairs.probe"), "F1": ("heldout.accuracy",)}
    assert claim.predictions[0].relation.links == (Link("a", ">", "b"), Link("b", ">", "c"))
    assert claim.links == 2
    assert claim.evidence("smoke") == tmp_path / "a-claim" / "evidence" / "smoke.jsonl"
    assert claim.planned_seeds("smoke") == (5, 3)
    assert claim.planned_seeds("smoke", 3) == (5, 3, 0)


@pytest.mark.parametrize("n", [0, 4])
def test_more_seeds_than_the_claim_lists_are_refused(tmp_path, n):
    claim = load_claim(write(tmp_path, VALID))
    with pytest.raises(ValueError, match=f"3 seeds, {n}"):
        claim.planned_seeds("smoke", n)
    with pytest.raises(ValueError, match=r"no scale 'cpu'.*smoke"):
        claim.evidence("cpu")


REQUIRED = ["id", "title", "says", "sources", "arms", "control", "varies", "predictions", "seeds", "scales"]


@pytest.mark.parametrize("key", REQUIRED)
def test_every_key_that_is_missing_is_named(tmp_path, key):
    with pytest.raises(ValueError, match=rf"claim\.yaml: {key} is missing"):
        load_claim(write(tmp_path, changed(key, ...)))


@pytest.mark.parametrize("key", [*REQUIRED, "matched", "yardsticks", "regime"])
@pytest.mark.parametrize("value", [3.5, None, [None], {"odd": None}])
def test_every_wrong_type_is_a_value_error_that_names_file_and_key(tmp_path, key, value):
    with pytest.raises(ValueError, match=rf"claim\.yaml: {key}"):
        load_claim(write(tmp_path, changed(key, value)))


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("id", "other", "folder is called 'a-claim'"),
        ("varys", ["x"], "varys is not a known key; did you mean 'varies'"),
        ("arms/a/override", [], "arms.a.override .*did you mean 'overrides'"),
        ("arms/a/overrides", "x=1", r"arms.a.overrides must be a list, is text \('x=1'\)"),
        ("arms/a/overrides", [{"x": 1}], r"arms.a.overrides\[0\] must be text"),
        ("arms/1x", {"overrides": []}, "arms.1x must be a name"),
        ("arms", {"a": {"overrides": []}}, "at least two arms"),
        ("control", "d", "control is 'd', which is no arm; use one of a, b, c"),
        ("varies", [], "varies is empty"),
        ("seeds", [1, 2, 1], "seeds lists 1 more than once"),
        ("seeds", [], "seeds is empty"),
        ("seeds", [True], r"seeds\[0\] must be a whole number"),
        ("seeds", [-1], r"seeds\[0\]"),
        ("matched/nonpad", 0.1, "matched.nonpad .*did you mean 'nonpad_tokens'"),
        ("matched/steps", 2, r"relative tolerance in \[0, 1\)"),
        ("matched/steps", "1e-2", "write 1.0e-3"),
        ("matched/steps", True, "must be a number, is yes or no"),
        ("predictions/0/relation", "a > d", "names 'd', which is no arm; use a, b, c"),
        ("predictions/0/relation", "a better than b", "predictions.*relation.*not understood; write"),
        ("predictions/0/relation", "a = b within 0.1", "margin of its own"),
        ("predictions/0/margin", 0, "must be above 0"),
        ("predictions/0/metrics", "x", "did you mean 'metric'"),
        ("predictions/0/paper", [1], "paper must be a mapping"),
        ("predictions", [], "cannot be judged"),
        ("predictions", VALID["predictions"] * 2, "'p' is used twice"),
        ("sources", [], "published somewhere"),
        ("sources/0/year", "2019", "year must be a whole number"),
        ("sources/0/arxiv", 1234.5, "arxiv must be text"),
        ("sources/0/numbers/arms/the a", [1], "has 1 values for 2 metrics"),
        ("sources/0/numbers/arms/the a", [1, [2]], "must be a list of numbers"),
        ("sources/0/numbers/measured_as/bleu", "m", "measured_as.bleu is no column"),
        ("sources/0/numbers/arms", {"the d": [1, 2]}, "matches no arm; set `paper_name`"),
        ("scales/smoke/seeds", 4, "the claim lists 3"),
        ("scales/tiny", {}, "scales.tiny is not a known key; known here: smoke, cpu, gpu, paper"),
        ("scales", {}, "scales is empty"),
    ],
)
def test_what_is_wrong_is_said_with_the_way_out(tmp_path, place, value, says):
    path = write(tmp_path, changed(place, value))
    with pytest.raises(ValueError, match=says) as caught:
        load_claim(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", "must be a mapping"),
        ("", "must be a mapping, is empty"),
        ("a: [", "not valid YAML"),
        ("id: a\nid: b\n", "key 'id' is given twice"),
        ("arms: {a: {}, a: {}}\n", "key 'a' is given twice"),
        ("id: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_claim_is_a_value_error(tmp_path, text, says):
    with pytest.raises(ValueError, match=says):
        load_claim(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("a > b", [Link("a", ">", "b")]),
        ("a<b", [Link("a", "<", "b")]),
        ("a-1 < b_2 < 0.5", [Link("a-1", "<", "b_2"), Link("b_2", "<", 0.5)]),
        ("a = b within 0.03", [Link("a", "=", "b", 0.03)]),
        ("a = -1.5 within 1e-2", [Link("a", "=", -1.5, 0.01)]),
        ("a >= b - 0.2", [Link("a", ">=", "b", 0.2)]),
        ("a <= 4 + .5", [Link("a", "<=", 4.0, 0.5)]),
        ("e > f", [Link("e", ">", "f")]),
    ],
)
def test_relations(text, links):
    relation = parse_relation(text)
    assert list(relation.links) == links
    assert parse_relation("  " + text.replace(" ", "   ")).links == relation.links
    assert all(parse_relation(str(link)).links == (link,) for link in links)


@pytest.mark.parametrize(
    "text",
    ["", "a", "a >", "> b", "a > b < c", "0.5 > a", "a > 1 > b", "a = b", "a >= b", "a >= b + 1", "a <= b - 1",
     "a = b within -1", "a = b within 0", "a > a", "a ≥ b", "a > b within 1", "a > b c"],
)  # fmt: skip
def test_what_is_no_relation_is_refused(text):
    with pytest.raises(ValueError, match="relation"):
        parse_relation(text)


def test_claims_are_found_by_name_path_and_nearly(tmp_path):
    path = write(tmp_path, VALID)
    assert [claim.id for claim in find_claims([tmp_path, tmp_path])] == ["a-claim"]
    for name in ("a-claim", str(path), str(path.parent)):
        assert resolve_claim(name, [tmp_path]).id == "a-claim"
    with pytest.raises(ValueError, match="did you mean 'a-claim'"):
        resolve_claim("a-clam", [tmp_path])
    with pytest.raises(ValueError, match="known claims: a-claim"):
        resolve_claim("zzz", [tmp_path])
    with pytest.raises(ValueError, match="known claims: none"):
        resolve_claim("zzz", [])


def test_the_shipped_claims_load_and_declare_a_regime():
    claims = find_claims()
    assert {"sop-vs-nsp", "static-vs-dynamic-masking"} <= {claim.id for claim in claims}
    for claim in claims:
        assert claim.regime, claim.id
        assert "smoke" in claim.scales, claim.id
        assert all(source.not_controlled for source in claim.sources), claim.id
        assert (claim.folder / "notes.md").is_file(), claim.id
    assert claim_roots()


def test_budgets_that_can_be_matched_are_those_that_records_hold():
    assert MATCHABLE == BUDGETS
