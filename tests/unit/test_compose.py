"""What composing and preparing say and do, without a cell being trained."""

from pathlib import Path
from typing import Any

import pytest
from datahelp import small_corpus
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException

from clozelab.data import store
from clozelab.data.formats.segment_pair import SegmentPair
from clozelab.running.compose import compose_run, composer, one_line, prepare_data


def test_the_one_line_of_an_unknown_key_names_the_one_that_was_meant() -> None:
    with composer(), pytest.raises(HydraException) as caught:
        compose("train", ["model.hiden=64"])
    assert not GlobalHydra.instance().is_initialized()
    assert one_line(caught.value, []).endswith("there is no such key, did you mean model.hidden?")
    with composer():
        for _ in range(2):  # a refused override leaves the composer as it was
            with pytest.raises(ValueError, match=r"did you mean model\.hidden\?"):
                compose_run(["model.hiden=64"])


def test_what_configurations_share_is_opened_and_cut_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_corpus(tmp_path / "text")
    monkeypatch.setenv("CLOZELAB_CACHE", str(tmp_path / "cache"))
    opened: list[object] = []
    cut: list[tuple[int, str]] = []
    open_store, examples = store.open_store, SegmentPair.examples

    def counting_open(*arguments: Any) -> store.Store:
        opened.append(arguments[0])
        return open_store(*arguments)

    def counting_examples(self: SegmentPair, *arguments: Any) -> Any:
        cut.append((self.max_length, arguments[1]))
        return examples(self, *arguments)

    monkeypatch.setattr(store, "open_store", counting_open)
    monkeypatch.setattr(SegmentPair, "examples", counting_examples)
    shared = ["corpus=text", f"corpus.paths=[{tmp_path}/text/*.txt]", "tokenizer.vocab_size=400"]
    apart = [["task=mlm"], ["task=mlm_nsp"], ["task=mlm_sop", "format.max_length=64"], ["masking.rate=0.3"]]
    with composer():
        configs = [compose_run([*shared, *overrides]) for overrides in apart]
    prepare_data(configs)
    assert len(opened) == 1
    assert sorted(cut) == [(64, "train"), (64, "validation"), (128, "train"), (128, "validation")]
