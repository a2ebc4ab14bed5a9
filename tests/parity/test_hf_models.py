"""Our encoders against Hugging Face's at toy size, with their weights copied in: logits, losses and gradients.

All dimensions are distinct, so that no transposed axis can pass. The weights are large enough (scale 0.2) that
attention is far from uniform, and the biases are random too.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from clozelab.models.encoder import EncoderOption
from clozelab.models.hf import from_hf_state, hf_config, to_hf_state
from clozelab.models.positions.learned import LearnedOption
from clozelab.models.pretraining import PretrainingModel

transformers = pytest.importorskip("transformers", reason="parity needs transformers: pip install clozelab[hf]")

B, S, V, K = 5, 7, 99, 3
TOY = {"hidden": 36, "layers": 3, "heads": 4, "ffn": 53, "position": LearnedOption(17)}
ROBERTA = TOY | {"position": LearnedOption(17, offset=2), "segments": 1, "norm_eps": 1e-5}
ALBERT = {"embedding": 11, "share": "all", "activation": "gelu_new"}
CASES = {
    "BertForPreTraining": (EncoderOption(**TOY), 0, True),
    "BertForMaskedLM": (EncoderOption(**TOY), 0, False),
    "RobertaForMaskedLM": (EncoderOption(**ROBERTA), 1, False),
    "AlbertForPreTraining": (EncoderOption(**TOY, **ALBERT), 0, True),
    "AlbertForMaskedLM": (EncoderOption(**TOY, **ALBERT), 0, False),
}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def toy_batch(pad_id: int, segments: int, padded: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(2, V, (B, S), generator=generator)
    mask = torch.ones(B, S, dtype=torch.bool)
    if padded:
        mask[1, 4:] = mask[3, 5:] = False
    positions = torch.stack([torch.randperm(4, generator=generator)[:K].sort()[0] for _ in range(B)])
    target_ids = torch.randint(2, V, (B, K), generator=generator)
    target_ids[0, 2] = target_ids[3, 1] = -100
    return {
        "input_ids": torch.where(mask, ids, pad_id),
        "segment_ids": (torch.arange(S) >= 3).long().expand(B, S) * (segments > 1),
        "attention_mask": mask,
        "target_positions": positions,
        "target_ids": target_ids,
        "pair_labels": torch.tensor([0, 1, 1, 0, 1]),
    }


def pair_of_models(case: str) -> tuple[Any, PretrainingModel, EncoderOption, int, bool]:
    option, pad_id, pair = CASES[case]
    config = transformers.AutoConfig.for_model(**hf_config(option, V, pad_id))
    theirs = getattr(transformers, case)(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    ours = PretrainingModel(option, V, pad_id, pair=pair)
    ours.load_state_dict(from_hf_state(theirs.state_dict(), option, pair))
    return theirs.eval(), ours.eval(), option, pad_id, pair


def labels_of(batch: dict[str, Tensor]) -> Tensor:
    """[B, S]: Hugging Face's form of the targets."""
    labels = torch.full((B, S), -100)
    for b in range(B):
        for k in range(K):
            if batch["target_ids"][b, k] >= 0:
                labels[b, batch["target_positions"][b, k]] = batch["target_ids"][b, k]
    return labels


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_logits_losses_and_gradients_agree(case: str, padded: bool) -> None:
    theirs, ours, option, pad_id, pair = pair_of_models(case)
    batch = toy_batch(pad_id, option.segments, padded)
    inputs: dict[str, Tensor] = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"].long()}
    if option.segments > 1:
        inputs["token_type_ids"] = batch["segment_ids"]
    labels = {"labels": labels_of(batch)}
    if pair:
        name = "next_sentence_label" if case.startswith("Bert") else "sentence_order_label"
        labels[name] = batch["pair_labels"]
    expected = theirs(**inputs, **labels)

    hidden = ours.encoder(batch["input_ids"], batch["segment_ids"], batch["attention_mask"])
    assert ours.mlm is not None
    logits = ours.mlm(hidden)
    expected_logits = expected.prediction_logits if pair else expected.logits
    real = batch["attention_mask"]
    torch.testing.assert_close(logits[real], expected_logits[real], **TOLERANCE)

    sums = ours(batch)
    loss = sums.mlm_loss / sums.mlm_targets
    if pair:
        assert ours.pair is not None
        pair_logits = expected.sop_logits if case.startswith("Albert") else expected.seq_relationship_logits
        torch.testing.assert_close(ours.pair(hidden), pair_logits, **TOLERANCE)
        loss = loss + sums.pair_loss / sums.pair_rows
    torch.testing.assert_close(loss, expected.loss, **TOLERANCE)

    expected.loss.backward()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    decoder = next((name for name in gradients if name.endswith("decoder.bias")), None)
    if decoder is not None:
        gradients[decoder.replace("decoder.bias", "bias")] = gradients[decoder]
    expected_gradients = from_hf_state(gradients, option, pair)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected_gradients[name], **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("case", CASES)
def test_states_go_there_and_back(case: str) -> None:
    theirs, ours, option, pad_id, pair = pair_of_models(case)
    state = to_hf_state(ours.state_dict(), option)
    back = from_hf_state(state, option, pair)
    assert back.keys() == ours.state_dict().keys()
    assert all(torch.equal(value, back[name]) for name, value in ours.state_dict().items())
    fresh = getattr(transformers, case)(theirs.config).eval()
    missing, unexpected = fresh.load_state_dict(state, strict=False)
    assert not unexpected
    fresh.tie_weights()
    assert all("decoder" in name or name.endswith(".position_ids") for name in missing), missing
    batch = toy_batch(pad_id, option.segments, padded=False)
    torch.testing.assert_close(fresh(batch["input_ids"])[0], theirs(batch["input_ids"])[0])


def test_the_projection_and_segments_that_theirs_cannot_lack_change_nothing() -> None:
    option = EncoderOption(**TOY, share="all", segments=0)
    ours = PretrainingModel(option, V, 0).eval()
    theirs = transformers.AlbertForMaskedLM(transformers.AlbertConfig(**hf_config(option, V, 0))).eval()
    theirs.load_state_dict(to_hf_state(ours.state_dict(), option), strict=False)
    theirs.tie_weights()
    batch = toy_batch(0, 0, padded=False)
    assert ours.mlm is not None
    logits = ours.mlm(ours.encoder(batch["input_ids"], batch["segment_ids"], batch["attention_mask"]))
    torch.testing.assert_close(logits, theirs(batch["input_ids"]).logits, **TOLERANCE)


def test_a_missing_parameter_is_named() -> None:
    theirs, _, option, _, _ = pair_of_models("BertForMaskedLM")
    with pytest.raises(ValueError, match=r"pair\.pooler\.weight"):
        from_hf_state(theirs.state_dict(), option, pair=True)
