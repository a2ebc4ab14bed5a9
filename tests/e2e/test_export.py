"""A trained run leaves for Hugging Face, is fine-tuned there, and comes back."""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from clozelab import records
from clozelab.claims.schema import load_claim
from clozelab.cli import main
from clozelab.data.tokenizers import read_tokenizer
from clozelab.models.initialise import initialise
from clozelab.models.pretraining import PretrainingModel
from clozelab.options import build
from clozelab.running.claim_run import make_plan
from clozelab.running.compose import compose_run, composer, prepare_data, validate
from clozelab.running.directories import CHECKPOINT, freeze
from clozelab.running.export import export
from clozelab.running.filling import fill
from clozelab.running.start import start_state
from clozelab.running.trained import read_trained
from clozelab.training import cell
from clozelab.training.cell import run_cell
from tests.e2e.conftest import TINY, tiny
from tests.e2e.test_claim_run import CLAIM

SENTENCES = [
    "The Congress has passed an act, and the President has signed it.",
    "It is well.",
    "Our relations, in 1871, are on a basis of amity & trust.",
]
POSITIONS = "model.position.length=48"
LEARNS = [
    *(override for override in TINY if not override.startswith("evaluation.")),
    *("evaluation=[heldout_mlm]", "evaluation.heldout_mlm.examples=64"),
    *("budget.steps=120", "optimizer.lr=1e-2", "trainer.log_every=1"),
]
# The overrides that make a run of a family, and their class with all heads of that run.
FAMILIES: dict[str, tuple[list[str], str]] = {
    "bert": (["task=mlm_nsp"], "BertForPreTraining"),
    "roberta": (["model=roberta_tiny", "tokenizer=byte_bpe", "tokenizer.vocab_size=1200"], "RobertaForMaskedLM"),
    "albert": (["model=albert_tiny", "model.embedding=16", "model.layers=2", "task=mlm_sop"], "AlbertForPreTraining"),
    "distilbert": (["model.segments=0"], "DistilBertForMaskedLM"),
    "electra": (["model.embedding=16"], "ElectraForMaskedLM"),
    "modernbert": (
        [
            *("model/position=rope", "model.segments=0", "model.activation=geglu", "model.layers=3", "model.window=8"),
            *("model.norm_place=pre", "model.first_norm=false", "model.bias=false"),
        ],
        "ModernBertForMaskedLM",
    ),
}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def configured(*overrides: str) -> dict[str, Any]:
    taken = [o for o in LEARNS if not (o == POSITIONS and "model/position=rope" in overrides)]
    with composer():
        return compose_run([*taken, *overrides])


def trained(directory: Path, *overrides: str) -> Path:
    """A finished run that has learned something."""
    freeze(directory, configured(*overrides))
    assert run_cell(directory) is not None
    return directory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of BERT's kind, with both heads. Not to be changed."""
    return trained(tmp_path_factory.mktemp("runs") / "bert", *FAMILIES["bert"][0])


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its export. Not to be changed."""
    folder = tmp_path_factory.mktemp("exported") / "bert"
    export(run, folder)
    return folder


def model_in(run: Path) -> PretrainingModel:
    config = yaml.safe_load((run / "config.yaml").read_text())
    tokenizer = read_tokenizer(run / "tokenizer.json")
    pair = build(config["task"]).pair != "none"
    model = PretrainingModel(build(config["model"]), tokenizer.vocab_size, tokenizer.pad_id, pair=pair)
    saved = torch.load(run / CHECKPOINT, weights_only=True)["state_dict"]
    model.load_state_dict({name.removeprefix("model."): value for name, value in saved.items()})
    return model.eval()


def with_weights(run: Path, model: PretrainingModel, target: Path) -> Path:
    """A copy of a run whose checkpoint holds other weights."""
    shutil.copytree(run, target)
    saved = torch.load(run / CHECKPOINT, weights_only=True)
    saved["state_dict"] = {f"model.{name}": value for name, value in model.state_dict().items()}
    torch.save(saved, target / CHECKPOINT)
    return target


def batch_of(run: Path) -> dict[str, Tensor]:
    """The sentences as our formats write them: [CLS] ids [SEP], padded."""
    tokenizer = read_tokenizer(run / "tokenizer.json")
    rows = [[tokenizer.cls_id, *ids.tolist(), tokenizer.sep_id] for ids in tokenizer.encode_batch(SENTENCES)]
    width = max(map(len, rows))
    assert min(map(len, rows)) < width <= 48
    return {
        "input_ids": torch.tensor([row + [tokenizer.pad_id] * (width - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
    }


@torch.no_grad()
def outputs(model: PretrainingModel, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """(hidden states and logits where there is no padding, logits of the pair head)."""
    ids, real = batch["input_ids"], batch["attention_mask"].bool()
    hidden = model.encoder(ids, torch.zeros_like(ids), real)
    assert model.mlm is not None
    return hidden[real], model.mlm(hidden)[real], None if model.pair is None else model.pair(hidden)


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install clozelab[hf]")
    overrides, with_heads = FAMILIES[family]
    run, out = trained(tmp_path / "run", *overrides), tmp_path / "out"
    export(run, out)
    ours, batch = model_in(run), batch_of(run)
    real = batch["attention_mask"].bool()
    hidden, logits, pair_logits = outputs(ours, batch)

    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    theirs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    assert torch.equal(theirs["input_ids"], batch["input_ids"])
    assert torch.equal(theirs["attention_mask"], batch["attention_mask"])
    assert tokenizer.mask_token_id == read_tokenizer(run / "tokenizer.json").mask_id
    assert tokenizer.model_max_length == 48
    bare = transformers.AutoModel.from_pretrained(out).eval()
    assert bare.config.model_type == family
    torch.testing.assert_close(bare(**theirs).last_hidden_state[real], hidden, **CLOSE)
    masked_lm = transformers.AutoModelForMaskedLM.from_pretrained(out).eval()
    torch.testing.assert_close(masked_lm(**theirs).logits[real], logits, **CLOSE)

    tuned = getattr(transformers, with_heads).from_pretrained(out).eval()
    given = dict(theirs)
    if pair_logits is not None:
        torch.testing.assert_close(tuned(**theirs)[1], pair_logits, **CLOSE)
        name = "next_sentence_label" if family == "bert" else "sentence_order_label"
        given[name] = torch.tensor([0, 1, 0])
    tuned(**given, labels=theirs["input_ids"]).loss.backward()
    torch.optim.SGD(tuned.parameters(), lr=0.1).step()
    tuned.save_pretrained(tmp_path / "tuned")

    found = start_state(tmp_path / "tuned", ours)
    assert found.new == []
    ours.load_state_dict(found.state)
    moved = outputs(ours, batch)
    torch.testing.assert_close(moved[1], tuned(**theirs)[0][real], **CLOSE)
    assert float((moved[1] - logits).abs().max()) > 1e-3
    export(with_weights(run, ours, tmp_path / "back"), tmp_path / "again")
    one, other = (load_file(tmp_path / folder / "model.safetensors") for folder in ("tuned", "again"))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_a_discriminator_there_and_back(tmp_path: Path) -> None:
    """The generator stays behind; the rest is ElectraForPreTraining, and a start for another discriminator."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install clozelab[hf]")
    told = ["task=replaced_tokens", "model.embedding=16", "evaluation=[heldout_replaced]"]
    run, out = tmp_path / "run", tmp_path / "out"
    with composer():
        freeze(run, compose_run(tiny(*told, "budget.steps=20")))
    run_cell(run)
    export(run, out)
    config, tokenizer, state, _ = read_trained(run)
    ours = build(config["task"]).build(build(config["model"]), tokenizer.vocab_size, tokenizer.pad_id)
    ours.load_state_dict(state)
    ours.eval()
    batch = batch_of(run)
    theirs = transformers.AutoModelForPreTraining.from_pretrained(out).eval()
    assert type(theirs).__name__ == "ElectraForPreTraining"
    real = batch["attention_mask"].bool()
    hidden = ours.encoder(batch["input_ids"], torch.zeros_like(batch["input_ids"]), real)
    torch.testing.assert_close(theirs(**batch).logits[real], ours.replaced(hidden)[real], **CLOSE)
    assert "AutoModelForPreTraining" in (out / "README.md").read_text()

    other = build(config["task"]).build(build(config["model"]), tokenizer.vocab_size, tokenizer.pad_id)
    initialise(other, 5)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    found = start_state(out, other)
    assert (found.new, found.unused) == (["generator"], [])
    other.load_state_dict(found.state)
    after = other.state_dict()
    for name, value in after.items():
        alone = name.startswith("generator.") and not name.startswith("generator.encoder.embeddings.")
        alone |= name.startswith("generator.encoder.embeddings.project")
        expected = before[name] if alone and name != "generator.mlm.weight" else state[name]
        assert torch.equal(value, expected), name

    masked = PretrainingModel(build(config["model"]), tokenizer.vocab_size, tokenizer.pad_id)
    found = start_state(out, masked)
    assert (found.new, found.unused) == (["mlm"], ["replaced"])
    with pytest.raises(ValueError, match=r"has no \[MASK\]"):
        fill(run, ["no mask here"], 3)
    assert fill(run, ["The [MASK] is here."], 3) == 0


def test_two_texts_are_a_pair_as_our_format_writes_it(run: Path, exported: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install clozelab[hf]")
    ours = read_tokenizer(run / "tokenizer.json")
    first, second = (ids.tolist() for ids in ours.encode_batch(SENTENCES[:2]))
    theirs = transformers.AutoTokenizer.from_pretrained(exported)(*SENTENCES[:2])
    assert theirs["input_ids"] == [ours.cls_id, *first, ours.sep_id, *second, ours.sep_id]
    assert theirs["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)


def test_the_folder_tells_what_it_is(run: Path, exported: Path) -> None:
    assert {path.name for path in exported.iterdir()} == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        *("README.md", "record.json"),
    }
    assert (exported / "record.json").read_bytes() == (run / "record.json").read_bytes()
    (record,) = records.read_records(run / "record.json")
    card = (exported / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == "transformers"
    assert front["pipeline_tag"] == "fill-mask"
    for told in (
        record.cell,
        f"{record.metrics['heldout_mlm.loss'].value:.4f}",
        record.provenance["data"]["fingerprint"],
        record.provenance["code"],
        f"{record.budgets['nonpad_tokens']:,}",
        record.provenance["versions"]["torch"],
    ):
        assert told in card
    assert not [path for path in exported.parent.iterdir() if path.name.startswith(".")]


def test_a_run_that_has_not_ended_is_exported_and_says_so(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "cut")
    (tmp_path / "cut" / "record.json").unlink()
    export(tmp_path / "cut", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "had not ended" in card
    assert "step 120" in card
    assert not (tmp_path / "out" / "record.json").exists()


@contextmanager
def refused(capsys: pytest.CaptureFixture[str], *named: str) -> Iterator[list[str]]:
    """The arguments put into the list are refused: exit code 2 and one line that has the words."""
    arguments: list[str] = []
    yield arguments
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    for word in named:
        assert word in line, line


def test_what_cannot_be_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "file").touch()
    for target in ("full", "file"):
        with refused(capsys, target, "exists already") as arguments:
            arguments += ["export", str(run), str(tmp_path / target)]
    with refused(capsys, "holds no config.yaml") as arguments:
        arguments += ["export", str(tmp_path / "full"), str(tmp_path / "out")]
    for name, word in ((CHECKPOINT, "last.ckpt"), ("tokenizer.json", "tokenizer.json")):
        shutil.copytree(run, tmp_path / word)
        (tmp_path / word / name).unlink()
        with refused(capsys, f"holds no {name}") as arguments:
            arguments += ["export", str(tmp_path / word), str(tmp_path / "out")]
    shutil.copytree(run, tmp_path / "windowed")
    freeze(tmp_path / "windowed", configured("task=mlm_nsp", "model.window=8", "model.layers=2"))
    with refused(capsys, "model.window=8", "bert") as arguments:
        arguments += ["export", str(tmp_path / "windowed"), str(tmp_path / "out")]
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


def test_an_empty_folder_is_filled(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export(run, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


# Starting from a folder ----------------------------------------------------------------------------------------------


def losses(directory: Path) -> list[float]:
    return [json.loads(line)["loss/mlm"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_training_goes_on_where_the_exported_run_ended(run: Path, exported: Path, tmp_path: Path) -> None:
    config = configured("task=mlm_sop", f"init_from={exported}", "budget.steps=4", "seed=1")
    validate(config)
    prepare_data([config])
    freeze(tmp_path / "on", config)
    record = run_cell(tmp_path / "on")
    (before,) = records.read_records(run / "record.json")
    assert record is not None
    ended = sum(losses(run)[-10:]) / 10
    assert losses(run)[0] == pytest.approx(math.log(1000), abs=0.3)
    assert losses(tmp_path / "on")[0] == pytest.approx(ended, abs=0.5)
    assert ended < math.log(1000) - 0.8
    assert record.provenance["init_from"]["cell"] == before.cell
    assert record.config["init_from"] == str(exported)


def test_a_head_that_begins_anew_is_named_in_the_log(exported: Path, tmp_path: Path, caplog: Any) -> None:
    shutil.copytree(exported, tmp_path / "headless")
    weights = tmp_path / "headless" / "model.safetensors"
    save_file({k: v for k, v in load_file(weights).items() if "pooler" not in k and "seq_rel" not in k}, weights)
    with caplog.at_level("INFO", logger="clozelab"):
        trained(tmp_path / "on", "task=mlm_sop", f"init_from={tmp_path / 'headless'}", "budget.steps=1")
    assert "with initial values: pair.pooler, pair.classifier" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO", logger="clozelab"):
        trained(tmp_path / "mlm", "task=mlm", f"init_from={exported}", "budget.steps=1")
    assert "not used: pair.pooler, pair.classifier" in caplog.text


def test_a_run_that_goes_on_from_its_checkpoint_does_not_start_again(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = trained(tmp_path / "on", f"init_from={exported}", "budget.steps=3")
    (record,) = records.read_records(directory / "record.json")
    (directory / "record.json").unlink()
    monkeypatch.setattr(cell, "start_from", lambda *_: pytest.fail("it loaded the weights again"))
    again = run_cell(directory)
    assert again is not None
    assert (again.cell, again.metrics) == (record.cell, record.metrics)
    assert again.provenance["init_from"] == record.provenance["init_from"]


def test_what_cannot_be_started_from(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = ["train", *LEARNS, f"runs_dir={tmp_path / 'runs'}", f"init_from={exported}"]
    with refused(capsys, "init_from", "model.layers is 2 here and 1 there", "give model.layers=1") as arguments:
        arguments += [*start, "model.layers=2", "corpus=text", "corpus.paths=[nowhere.txt]"]
    way_out = f"tokenizer=file tokenizer.path={exported}"
    with refused(capsys, "embeddings of 1000 tokens", "900", way_out) as arguments:
        arguments += [*start, "tokenizer.vocab_size=900"]
    with refused(capsys, "other ids", way_out) as arguments:
        arguments += [*start, "corpus.train_documents=3"]
    shutil.copytree(exported, tmp_path / "broken")
    weights = tmp_path / "broken" / "model.safetensors"
    state = load_file(weights)
    del state["bert.embeddings.LayerNorm.bias"], state["bert.encoder.layer.0.output.dense.weight"]
    save_file(state | {"one.more": torch.zeros(1)}, weights)
    named = ("bert.embeddings.LayerNorm.bias", "bert.encoder.layer.0.output.dense.weight", "one.more")
    with refused(capsys, *named) as arguments:
        arguments += [*start, f"init_from={tmp_path / 'broken'}"]
    with refused(capsys, *named) as arguments:
        arguments += ["import", str(tmp_path / "broken")]
    assert not (tmp_path / "runs").exists()


def test_another_corpus_with_the_tokenizer_of_the_folder(exported: Path, tmp_path: Path) -> None:
    overrides = [o for o in LEARNS if not o.startswith(("tokenizer", "corpus"))]
    with composer():
        config = compose_run(
            [
                *overrides,
                "corpus.train_documents=3",
                "tokenizer=file",
                f"tokenizer.path={exported}",
                f"init_from={exported}",
            ]
        )
    validate(config)
    prepare_data([config])


def test_import_tells_what_lies_there(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(exported)]) == 0
    shown = capsys.readouterr().out
    assert "bert, " in shown
    assert "mlm, pair.pooler, pair.classifier" in shown
    assert f"tokenizer=file tokenizer.path={exported}" in shown


def test_arms_of_a_claim_start_from_the_content_of_a_folder(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "claim.yaml").write_text(yaml.safe_dump(CLAIM))
    claim = load_claim(tmp_path / "toy")
    shutil.copytree(exported, tmp_path / "copy")

    def cells(*overrides: str) -> list[str]:
        return [cell.id for cell in make_plan(claim, "smoke", tmp_path / "runs", 1, list(overrides)).cells]

    nothing, here = cells(), cells(f"init_from={exported}")
    assert not set(nothing) & set(here)
    assert here == cells(f"init_from={tmp_path / 'copy'}")
    weights = tmp_path / "copy" / "model.safetensors"
    save_file({name: value + 1 for name, value in load_file(weights).items()}, weights)
    assert not set(here) & set(cells(f"init_from={tmp_path / 'copy'}"))
