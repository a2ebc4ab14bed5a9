"""Run directories: exclusive, frozen, and only where there is room."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from clozelab.running.directories import check_room, freeze, slug, unique_directory


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_no_room_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**9, 10**9 - 10**6, 10**6))
    check_room(tmp_path / "not" / "yet", 10**6, "2 cells")
    with pytest.raises(ValueError, match=r"2 cells need about 50 MB in .*not/yet, and 1 MB are free"):
        check_room(tmp_path / "not" / "yet", 50 * 10**6, "2 cells")


def test_two_runs_of_one_second_never_share_a_directory(tmp_path: Path) -> None:
    made = [unique_directory(tmp_path / "runs", "same") for _ in range(3)]
    assert [path.name for path in made] == ["same", "same-2", "same-3"]


def test_freeze_writes_the_whole_configuration(tmp_path: Path) -> None:
    config = {"seed": 3, "model": {"layers": 2, "note": "ünï"}, "list": [1, None, True]}
    freeze(tmp_path / "run", config)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()) == config
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_freeze_into_a_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match="taken"):
        freeze(tmp_path / "taken" / "run", {})


@pytest.mark.parametrize(
    ("text", "name"), [("a/b c", "a-b-c"), ("../..", "..-.."), ("x" * 90, "x" * 40), ("", "run"), ("ä", "run")]
)
def test_slugs_are_safe_names(text: str, name: str) -> None:
    assert slug(text) == name
