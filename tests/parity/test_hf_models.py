"""Our encoders against Hugging Face's at toy size, with their weights copied in: logits, losses and gradients."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from differences import Worst
from torch import Tensor

from clozelab.models.encoder import EncoderOption
from clozelab.models.hf import family_of, from_hf_state, hf_config, option_of, to_hf_state
from clozelab.models.hf.maps import FAMILIES
from clozelab.models.hf.state import made_of
from clozelab.models.initialise import initialise
from clozelab.models.positions.sinusoidal import SinusoidalOption
from clozelab.models.pretraining import PretrainingModel

transformers = pytest.importorskip("transformers", reason="parity needs transformers: pip install clozelab[hf]")
from toy_models import ALBERT, BERT, CASES, DISTILBERT, ELECTRA, EXPORTED, V, labels_of, toy_batch  # noqa: E402

TOLERANCE = {"rtol": 0.0, "atol": 1e-5}


def agree(ours: Tensor, theirs: Tensor, name: str, column: str, worst: Worst, what: str = "") -> None:
    worst.see(name, column, float((ours - theirs).detach().abs().max()))
    torch.testing.assert_close(ours, theirs, **TOLERANCE, msg=lambda message: f"{what or column}: {message}")


@pytest.mark.parametrize("form", ["full", "padded", "unpadded"])
@pytest.mark.parametrize("name", CASES)
def test_logits_losses_and_gradients_agree(name: str, form: str, worst: Worst) -> None:
    case = CASES[name]
    theirs, ours = case.build()
    batch = toy_batch(case.pad_id, case.option.segments, padded=form != "full")
    ours.encoder.unpad = form == "unpadded"
    inputs: dict[str, Tensor] = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"].long()}
    if case.option.segments > 1:
        inputs["token_type_ids"] = batch["segment_ids"]
    hidden = ours.encoder(batch["input_ids"], batch["segment_ids"], batch["attention_mask"])
    real = batch["attention_mask"]

    if case.encoder is not None:
        expected = (getattr(theirs, case.encoder) if case.encoder else theirs)(**inputs).last_hidden_state
        agree(hidden[real], expected[real], name, "logits", worst)
        probe = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5)) / case.option.hidden**0.5
        loss, expected_loss = ((states * probe)[real].sum(-1).mean() for states in (hidden, expected))
    else:
        labels = {"labels": labels_of(batch)}
        if case.pair:
            label = "sentence_order_label" if case.theirs.startswith("Albert") else "next_sentence_label"
            labels[label] = batch["pair_labels"]
        outputs = theirs(**inputs, **labels)
        assert ours.mlm is not None
        logits = outputs.prediction_logits if case.pair else outputs.logits
        agree(ours.mlm(hidden)[real], logits[real], name, "logits", worst)
        sums = ours(batch)
        loss, expected_loss = sums.mlm_loss / sums.mlm_targets, outputs.loss
        if case.pair:
            assert ours.pair is not None
            pair_logits = outputs.sop_logits if case.theirs.startswith("Albert") else outputs.seq_relationship_logits
            agree(ours.pair(hidden), pair_logits, name, "logits", worst)
            loss = loss + sums.pair_loss / sums.pair_rows
    agree(loss, expected_loss, name, "loss", worst)

    expected_loss.backward()
    loss.backward()
    found = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    gradients = {name: p.grad for name, p in ours.named_parameters() if case.encoder is None or "encoder." in name}
    expected_gradients = case.ours_of(found, list(gradients), 1 / case.query_scale)
    assert expected_gradients.keys() == gradients.keys()
    for parameter, gradient in gradients.items():
        assert gradient is not None, parameter
        agree(gradient, expected_gradients[parameter], name, "gradients", worst, parameter)


@pytest.mark.parametrize("form", ["full", "padded", "unpadded"])
@pytest.mark.parametrize("option", [ELECTRA, BERT], ids=["E < H", "E = H"])
def test_a_discriminator_agrees(option: EncoderOption, form: str, worst: Worst) -> None:
    """ElectraForPreTraining: its logit for each token, its mean loss over tokens, its gradients."""
    name = f"ElectraForPreTraining, {'E < H' if option is ELECTRA else 'E = H'}"
    theirs = transformers.ElectraForPreTraining(
        transformers.AutoConfig.for_model(**hf_config(option, V, 0, replaced=True))
    ).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            parameter.normal_(float(parameter.ndim == 1 and key.endswith("weight")), 0.2, generator=generator)
    ours = PretrainingModel(option, V, 0, mlm=False, replaced=True).eval()
    ours.load_state_dict(from_hf_state(theirs.state_dict(), option, mlm=False, replaced=True))
    ours.encoder.unpad = form == "unpadded"
    batch = toy_batch(0, 2, padded=form != "full")
    labels = torch.rand(batch["input_ids"].shape, generator=generator) < 0.3
    sums = ours(batch | {"replaced": labels})
    expected = theirs(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"].long(),
        token_type_ids=batch["segment_ids"],
        labels=labels.long(),
    )
    hidden = ours.encoder(batch["input_ids"], batch["segment_ids"], batch["attention_mask"])
    assert ours.replaced is not None
    real = batch["attention_mask"]
    agree(ours.replaced(hidden)[real], expected.logits[real], name, "logits", worst)
    assert sums.replaced_tokens == real.sum()
    assert sums.replaced_correct == ((expected.logits > 0) == labels)[real].sum()
    agree(sums.replaced_loss / sums.replaced_tokens, expected.loss, name, "loss", worst)
    (sums.replaced_loss / sums.replaced_tokens).backward()
    expected.loss.backward()
    found = {key: parameter.grad for key, parameter in theirs.named_parameters() if parameter.grad is not None}
    gradients = {key: parameter.grad for key, parameter in ours.named_parameters()}
    wanted = made_of(found, gradients, option, FAMILIES["electra"])
    assert wanted.keys() == gradients.keys()
    for key, gradient in gradients.items():
        assert gradient is not None, key
        agree(gradient, wanted[key], name, "gradients", worst, key)
    back = to_hf_state(ours.state_dict(), option, "electra")
    state = theirs.state_dict()
    assert back.keys() == {key for key in state if not key.endswith("position_ids")}
    for key, value in back.items():
        assert torch.equal(value, state[key]), key


@pytest.mark.parametrize("name", EXPORTED)
def test_states_go_there_and_back(name: str) -> None:
    case = EXPORTED[name]
    theirs, ours = case.build()
    state = to_hf_state(ours.state_dict(), case.option)
    back = from_hf_state(state, case.option, case.pair)
    assert back.keys() == ours.state_dict().keys()
    assert all(torch.equal(value, back[name]) for name, value in ours.state_dict().items())
    fresh = loaded(case.theirs, theirs.config, state)
    batch = toy_batch(case.pad_id, case.option.segments, padded=False)
    torch.testing.assert_close(fresh(batch["input_ids"])[0], theirs(batch["input_ids"])[0])


def loaded(name: str, config: Any, state: dict[str, Tensor]) -> Any:
    model = getattr(transformers, name)(config).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    tied = {*getattr(model, "_tied_weights_keys", {})} if config.tie_word_embeddings else set()
    assert {*missing} <= tied, missing
    model.tie_weights()
    return model


@pytest.mark.parametrize(
    "option",
    [
        replace(BERT, segments=0, norm_eps=1e-5),
        replace(ALBERT, embedding=None, segments=0),
        replace(ELECTRA, segments=0),
        replace(DISTILBERT, position=SinusoidalOption()),
    ],
    ids=family_of,
)
def test_what_theirs_cannot_do_without_changes_nothing(option: EncoderOption) -> None:
    ours = PretrainingModel(option, V, 0).eval()
    initialise(ours, 0)
    config = hf_config(option, V, 0)
    state = to_hf_state(ours.state_dict(), option)
    theirs = loaded(config["architectures"][0], transformers.AutoConfig.for_model(**config), state)
    batch = toy_batch(0, 0, padded=False)
    assert ours.mlm is not None
    logits = ours.mlm(ours.encoder(batch["input_ids"], batch["segment_ids"], batch["attention_mask"]))
    torch.testing.assert_close(logits, theirs(batch["input_ids"]).logits, **TOLERANCE)
    # Where it does change something it is refused.
    from_hf_state(state, option)
    for name in ("token_type_embeddings.weight", "mapping_in.weight", "position_embeddings.weight"):
        for full in (full for full in state if full.endswith(name)):
            if not isinstance(option.position, SinusoidalOption) and name.startswith("position"):
                continue
            with pytest.raises(ValueError, match=f"unexpected: {re.escape(full)}$"):
                from_hf_state(state | {full: state[full] + 0.1}, option)


@pytest.mark.parametrize("name", [name for name, case in EXPORTED.items() if not case.pair])
def test_an_exported_folder_opens_as_the_same_model(name: str, tmp_path: Any) -> None:
    case = EXPORTED[name]
    theirs, ours = case.build()
    theirs.config.save_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    batch = toy_batch(case.pad_id, case.option.segments, padded=False)
    torch.testing.assert_close(model(batch["input_ids"]).logits, theirs(batch["input_ids"]).logits)
    # What their classes write describes the same encoder as what we wrote.
    option = option_of(theirs.config.to_dict())
    assert family_of(option) == family_of(case.option)
    back = from_hf_state(model.state_dict(), option)
    assert all(torch.equal(value, back[name]) for name, value in ours.state_dict().items())


def state_of(name: str) -> tuple[dict[str, Tensor], EncoderOption]:
    theirs, _ = CASES[name].build()
    return theirs.state_dict(), CASES[name].option


def test_all_that_is_missing_unexpected_or_of_another_shape_is_named() -> None:
    state, option = state_of("BertForMaskedLM")
    with pytest.raises(
        ValueError, match=r"missing: pair\.classifier.*pair\.pooler\.weight \(bert\.pooler\.dense\.weight\)"
    ):
        from_hf_state(state, option, pair=True)
    del state["bert.encoder.layer.1.attention.self.key.bias"], state["cls.predictions.transform.dense.bias"]
    state["bert.encoder.layer.3.output.dense.bias"] = state["bert.embeddings.projection.weight"] = torch.zeros(1)
    state["bert.embeddings.position_embeddings.weight"] = torch.zeros(3, 36)
    with pytest.raises(ValueError) as error:
        from_hf_state(state, option)
    assert str(error.value) == (
        "the bert state does not fit the model: "
        "missing: encoder.blocks.1.attention.qkv.bias (bert.encoder.layer.1.attention.self.query.bias, "
        "bert.encoder.layer.1.attention.self.key.bias, bert.encoder.layer.1.attention.self.value.bias), "
        "mlm.dense.bias (cls.predictions.transform.dense.bias); "
        "unexpected: bert.embeddings.projection.weight, bert.encoder.layer.3.output.dense.bias; "
        "of another shape: encoder.embeddings.position.weight [3, 36] (not [17, 36])"
    )


def test_heads_buffers_and_copies_are_passed_over_and_a_copy_that_is_none_is_not() -> None:
    state, option = state_of("BertForPreTraining")
    state |= {"bert.embeddings.position_ids": torch.arange(17), "classifier.weight": torch.zeros(2, 36)}
    assert "pair.pooler.weight" not in from_hf_state(state, option)
    state["cls.predictions.decoder.weight"] = state["cls.predictions.decoder.weight"] + 1
    with pytest.raises(ValueError, match=r"unexpected: cls\.predictions\.decoder\.weight \(unlike bert\.embeddings"):
        from_hf_state(state, option)


def test_the_names_of_norms_in_old_files_are_known() -> None:
    state, option = state_of("BertForMaskedLM")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in state.items()
    }
    expected = from_hf_state(state, option)
    assert all(torch.equal(value, expected[name]) for name, value in from_hf_state(old, option).items())


def test_the_names_of_a_state_tell_its_family() -> None:
    # An ELECTRA as wide as its embedding is, but for its names, a BERT.
    config = transformers.AutoConfig.for_model(
        **hf_config(BERT, V, 0) | {"model_type": "electra", "embedding_size": 36}
    )
    theirs = transformers.ElectraForMaskedLM(config).eval()
    option = option_of(config.to_dict())
    assert family_of(option) == "bert"
    ours = PretrainingModel(option, V, 0).eval()
    ours.load_state_dict(from_hf_state(theirs.state_dict(), option))
    batch = toy_batch(0, 2, padded=False)
    hidden = ours.encoder(batch["input_ids"], batch["segment_ids"], batch["attention_mask"])
    assert ours.mlm is not None
    logits = theirs(batch["input_ids"], token_type_ids=batch["segment_ids"]).logits
    torch.testing.assert_close(ours.mlm(hidden), logits, **TOLERANCE)
    with pytest.raises(ValueError, match=r"model\.activation=gelu_new .* electra"):
        from_hf_state(theirs.state_dict(), replace(option, activation="gelu_new"))
    # Asked for, the family gives its names on the way back too.
    state = to_hf_state(ours.state_dict(), option, "electra")
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in state.items())
