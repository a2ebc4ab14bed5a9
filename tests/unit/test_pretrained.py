"""Folders in the Hugging Face layout, without transformers: read, held against a model of ours, refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from clozelab import records
from clozelab.models.encoder import EncoderOption
from clozelab.models.hf import family_of, hf_config, to_hf_state
from clozelab.models.initialise import initialise
from clozelab.models.overrides import differences
from clozelab.models.positions.learned import LearnedOption
from clozelab.models.positions.rope import RopeOption
from clozelab.models.positions.sinusoidal import SinusoidalOption
from clozelab.models.pretrained import read_pretrained, weight_files, weights_fingerprint
from clozelab.models.pretraining import PretrainingModel
from clozelab.options import build
from clozelab.running.compose import compose_run, composer
from clozelab.running.importing import show
from clozelab.running.start import check_encoder, pinned, start_state

V = 61
TOY = {"hidden": 12, "layers": 2, "heads": 3, "ffn": 20, "position": LearnedOption(17)}
MODERN = TOY | {"norm_place": "pre", "first_norm": False, "segments": 0, "position": RopeOption(160_000.0, 10_000.0)}
OPTIONS = {
    "bert": EncoderOption(**TOY),
    "roberta": EncoderOption(**TOY | {"position": LearnedOption(17, offset=1), "segments": 1, "norm_eps": 1e-5}),
    "albert": EncoderOption(**TOY, embedding=5, share="all", activation="gelu_new"),
    "distilbert": EncoderOption(**TOY | {"segments": 0}),
    "electra": EncoderOption(**TOY, embedding=5),
    "modernbert": EncoderOption(**MODERN, activation="geglu", bias=False, window=4, dropout=0.0),
    # What theirs cannot do without, and ours can.
    "bert without segments": EncoderOption(**TOY | {"segments": 0, "norm_eps": 1e-5}),
    "albert without projection": EncoderOption(**TOY, share="all"),
    "sinusoidal": EncoderOption(**TOY | {"segments": 0, "position": SinusoidalOption()}),
    "untied": EncoderOption(**TOY, tie_output=False),
}


def model_of(option: EncoderOption, pair: bool = True, seed: int = 3) -> PretrainingModel:
    model = PretrainingModel(option, V, 0, pair=pair)
    initialise(model, seed)
    return model


def folder_of(folder: Path, model: PretrainingModel) -> Path:
    """What `clozelab export` writes, without a tokenizer."""
    folder.mkdir()
    option = model.encoder.option
    (folder / "config.json").write_text(json.dumps(hf_config(option, V, 0)))
    save_file(to_hf_state(model.state_dict(), option), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def change(folder: Path, **replaced: Tensor | None) -> None:
    """Put tensors in place of others; None takes one out. Names have __ for a point."""
    state = load_file(folder / "model.safetensors")
    for name, value in replaced.items():
        name = name.replace("__", ".")
        if value is None:
            del state[name]
        else:
            state[name] = value
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_model_comes_back_as_it_was(tmp_path: Path, name: str, pair: bool) -> None:
    model = model_of(OPTIONS[name], pair)
    folder = folder_of(tmp_path / "out", model)
    assert name not in OPTIONS or " " in name or name in (family_of(OPTIONS[name]), "sinusoidal", "untied")
    other = model_of(OPTIONS[name], pair, seed=4)
    found = start_state(folder, other)
    assert (found.new, found.unused) == ([], [])
    other.load_state_dict(found.state)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["bert", "albert", "electra", "modernbert"])
def test_a_head_that_is_missing_begins_anew(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path / "out", model_of(OPTIONS[name], pair=False))
    ours = model_of(OPTIONS[name], pair=True, seed=4)
    found = start_state(folder, ours)
    assert found.new == ["pair.pooler", "pair.classifier"]
    for key, value in ours.state_dict().items():
        if key.startswith("pair."):
            assert torch.equal(found.state[key], value)


def test_a_head_that_the_run_has_not_is_left_there(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "out", model_of(OPTIONS["bert"]))
    assert start_state(folder, model_of(OPTIONS["bert"], pair=False)).unused == ["pair.pooler", "pair.classifier"]


@pytest.mark.parametrize("name", ["bert", "roberta", "albert", "distilbert", "electra", "modernbert"])
def test_an_encoder_saved_without_heads(tmp_path: Path, name: str) -> None:
    model = model_of(OPTIONS[name], pair=False)
    folder = folder_of(tmp_path / "out", model)
    base = "model." if name == "modernbert" else f"{name}."
    state = load_file(folder / "model.safetensors")
    state = {key.removeprefix(base): value for key, value in state.items() if key.startswith(base)}
    save_file(state, folder / "model.safetensors")
    other = model_of(OPTIONS[name], pair=False, seed=4)
    found = start_state(folder, other)
    assert found.new == ["mlm"]
    for key, value in model.state_dict().items():
        expected = value if key.startswith("encoder.") or key == "mlm.weight" else other.state_dict()[key]
        assert torch.equal(found.state[key], expected), key


def test_every_missing_unexpected_or_misshapen_parameter_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "out", model_of(OPTIONS["bert"]))
    change(
        folder,
        bert__encoder__layer__0__output__dense__bias=None,
        cls__predictions__transform__dense__weight=None,
        bert__encoder__layer__7__output__dense__bias=torch.zeros(12),
        something__else=torch.zeros(2),
        bert__encoder__layer__1__output__dense__weight=torch.zeros(12, 21),
    )
    with pytest.raises(ValueError) as caught:
        start_state(folder, model_of(OPTIONS["bert"]))
    message = str(caught.value)
    assert message.startswith(f"init_from: {folder}")
    assert "\n" not in message
    for name in (
        "bert.encoder.layer.0.output.dense.bias",
        "cls.predictions.transform.dense.weight",
        "bert.encoder.layer.7.output.dense.bias",
        "something.else",
        "encoder.blocks.1.ffn.down.weight [12, 21]",
    ):
        assert name in message


def test_weights_of_another_size_than_config_json_says(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "out", model_of(OPTIONS["bert"]))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 99}))
    model = PretrainingModel(OPTIONS["bert"], 99, 0)
    with pytest.raises(ValueError, match=r"encoder\.embeddings\.token\.weight is \[61, 12\], not \[99, 12\]"):
        start_state(folder, model)


def test_parts_of_a_product_that_do_not_fit_together(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "out", model_of(OPTIONS["bert"]))
    change(folder, bert__encoder__layer__0__attention__self__key__weight=torch.zeros(12, 11))
    with pytest.raises(ValueError, match=r"out: .*(fit no model|query)"):
        start_state(folder, model_of(OPTIONS["bert"]))


def test_a_segment_row_that_does_something_is_no_model_without_segments(tmp_path: Path) -> None:
    option = OPTIONS["bert without segments"]
    folder = folder_of(tmp_path / "out", model_of(option))
    change(folder, bert__embeddings__token_type_embeddings__weight=torch.ones(1, 12))
    with pytest.raises(ValueError, match=r"unexpected: bert\.embeddings\.token_type_embeddings"):
        start_state(folder, model_of(option))


def test_shards_are_one_model(tmp_path: Path) -> None:
    model = model_of(OPTIONS["bert"])
    folder = folder_of(tmp_path / "out", model)
    state = load_file(folder / "model.safetensors")
    files = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(state)}
    for file in set(files.values()):
        save_file({name: value for name, value in state.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    found = start_state(folder, model_of(OPTIONS["bert"], seed=4)).state
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model-00002-of-00002.safetensors"):
        weight_files(folder)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file .*nowhere/config.json"):
        read_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no folder .*nowhere"):
        weights_fingerprint(tmp_path / "nowhere")
    folder = folder_of(tmp_path / "out", model_of(OPTIONS["bert"]))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-40])
    with pytest.raises(ValueError, match="no whole safetensors file"):
        start_state(folder, model_of(OPTIONS["bert"]))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin, a pickle.*save_pretrained"):
        read_pretrained(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"holds no model.safetensors"):
        read_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        read_pretrained(folder)


def test_a_config_that_we_cannot_take(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "out", model_of(OPTIONS["bert"]))
    config = json.loads((folder / "config.json").read_text())
    for key, value in (("model_type", "t5"), ("is_decoder", True), ("hidden_act", "tanh")):
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(ValueError, match=rf"config\.json: .*{key}={value!r}"):
            read_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": None}))
    with pytest.raises(ValueError, match=r"config\.json: "):
        read_pretrained(folder)


def test_another_encoder_is_refused_with_the_overrides_that_make_it_this_one(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "out", model_of(OPTIONS["bert"]))
    wider = EncoderOption(**TOY | {"hidden": 24, "layers": 1, "position": LearnedOption(32)}, dropout=0.5)
    with pytest.raises(ValueError) as caught:
        check_encoder(folder, wider)
    message = str(caught.value)
    assert message.startswith("init_from: ")
    assert "model.hidden is 24 here and 12 there" in message
    assert message.endswith("give model.hidden=12 model.layers=2 model.position.length=17")


@pytest.mark.parametrize("name", OPTIONS)
def test_overrides_make_one_encoder_of_another(name: str) -> None:
    theirs = OPTIONS[name]
    with composer():
        for start in ("encoder", "bert_tiny", "albert_tiny", "roberta_mini"):
            ours = build(compose_run([f"model={start}"])["model"])
            overrides = dict.fromkeys(
                text for one in differences(ours, theirs, training=True) for text in one.overrides
            )
            made = build(compose_run([f"model={start}", *overrides])["model"])
            assert differences(made, theirs, training=True) == []


def test_settings_that_say_the_same_are_no_difference() -> None:
    ours = EncoderOption(**MODERN, activation="geglu", window=4, global_every=5, kv_heads=3, embedding=12, dropout=0.3)
    theirs = EncoderOption(**MODERN | {"ffn": ours.ffn_width}, activation="geglu", gated_width="ffn", window=4)
    assert differences(ours, theirs) == []


def test_the_identity_of_a_run_is_that_of_the_weights_and_not_of_their_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "out", model_of(OPTIONS["bert"]))
    shutil.copytree(folder, tmp_path / "copy")
    with composer():
        config = compose_run([])

    def cell(**start: str | None) -> str:
        return records.fingerprint(pinned(config | start), "data")

    here = cell(init_from=str(folder))
    assert here == cell(init_from=str(tmp_path / "copy"))
    change(tmp_path / "copy", cls__predictions__bias=torch.ones(V))
    assert here != cell(init_from=str(tmp_path / "copy"))
    before = {key: value for key, value in config.items() if key != "init_from"}
    assert cell(init_from=None) == records.fingerprint(before, "data") != here


def test_import_shows_how_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path / "out", model_of(OPTIONS["electra"], pair=False))
    assert show(folder) == 0
    shown = capsys.readouterr().out
    assert "heads that are there: mlm" in shown
    assert "pair.pooler, pair.classifier" in shown
    assert "no tokenizer" in shown
    overrides = shown.strip().splitlines()[-1].partition("clozelab train ")[2].split()
    with composer():
        config = compose_run(overrides)
    assert config["init_from"] == str(folder)
    assert config["format"]["max_length"] == 17
    assert differences(build(config["model"]), OPTIONS["electra"]) == []
