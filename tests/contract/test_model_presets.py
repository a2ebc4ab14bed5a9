"""Every preset of the model group: it composes, builds, trains, and has the published number of parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

from clozelab.models.encoder import EncoderOption
from clozelab.models.hf import hf_config, option_of
from clozelab.models.initialise import initialise
from clozelab.models.pretraining import PretrainingModel
from clozelab.options import build, discover

CONF = Path(__file__).parents[2] / "conf"
PRESETS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
VOCAB = {
    "bert": 30522,
    "roberta": 50265,
    "albert": 30000,
    "distilbert": 30522,
    "electra": 30522,
    "modernbert": 50368,
    "ernie": 18000,
}

# Hugging Face transformers 5.24 computed, on the meta device, tied weights counted once:
# (encoder, with_pooler, masked_lm, pretraining); None where it has no such class or was not computed.
PUBLISHED = {
    "bert_tiny": (None, 4_385_920, None, 4_433_468),
    "bert_mini": (None, 11_170_560, None, 11_267_900),
    "bert_small": (None, 28_763_648, None, 29_058_876),
    "bert_medium": (None, 41_373_184, None, 41_668_412),
    "bert_base": (108_891_648, 109_482_240, 109_514_298, 110_106_428),
    "bert_large": (334_092_288, 335_141_888, 335_174_458, 336_226_108),
    "roberta_base": (124_055_040, 124_645_632, 124_697_433, None),
    "roberta_large": (354_310_144, 355_359_744, 355_412_057, None),
    "albert_base": (11_092_992, 11_683_584, 11_221_680, 11_813_810),
    "albert_large": (16_634_368, 17_683_968, 16_795_824, 17_847_474),
    "albert_xlarge": (54_528_512, 58_724_864, 54_821_040, 59_021_490),
    "albert_xxlarge": (205_814_272, 222_595_584, 206_368_944, 223_158_450),
    "distilbert_base": (66_362_880, None, 66_985_530, None),
    "electra_small": (13_483_008, None, None, None),
    "modernbert_base": (149_014_272, None, 149_655_232, None),
    "modernbert_large": (394_781_696, None, 395_881_664, None),
    "ernie_base": (None, 99_866_112, 99_885_648, None),
}
# Hugging Face's model type of the presets whose names do not begin with it.
FAMILY = {"ernie": "bert"}
# What config.json of the release says, as far as it is not the default of Hugging Face's class.
RELEASED: dict[str, dict[str, Any]] = {
    "bert_base": {},
    "bert_large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "roberta_base": {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "albert_base": {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    },
    "albert_xxlarge": {"hidden_act": "gelu", "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
    "distilbert_base": {},
    "electra_small": {},
    "modernbert_base": {},
    "modernbert_large": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 2624,
    },
    "ernie_base": {"max_position_embeddings": 513, "hidden_act": "relu", "layer_norm_eps": 1e-5},
}


def preset(name: str) -> EncoderOption:
    discover("clozelab.models")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        option = build(compose(overrides=[f"+model={name}"]).model)
    assert isinstance(option, EncoderOption)
    return option


def prefix(name: str) -> str:
    return name.split("_")[0]


def numbers(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    option, vocab = preset(name), VOCAB[prefix(name)]
    with torch.device("meta"):
        masked_lm = PretrainingModel(option, vocab, 0)
        pretraining = PretrainingModel(option, vocab, 0, pair=True)
    assert pretraining.pair is not None
    counted = (
        numbers(pretraining.encoder),
        numbers(pretraining.encoder) + numbers(pretraining.pair.pooler),
        numbers(masked_lm),
        numbers(pretraining),
    )
    for ours, published in zip(counted, PUBLISHED[name], strict=True):
        assert published is None or ours == published


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_model_of_hugging_face_and_comes_back_from_its_configuration(name: str) -> None:
    option = preset(name)
    config = hf_config(option, VOCAB[prefix(name)], 1 if prefix(name) == "roberta" else 0)
    assert config["model_type"] == FAMILY.get(prefix(name), prefix(name))
    assert option_of(config) == option


@pytest.mark.parametrize("name", RELEASED)
def test_a_preset_is_what_was_released(name: str) -> None:
    assert option_of({"model_type": FAMILY.get(prefix(name), prefix(name)), **RELEASED[name]}) == preset(name)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_states_only_what_differs(name: str) -> None:
    option, default = preset(name), EncoderOption()
    text = (CONF / "model" / f"{name}.yaml").read_text()
    stated = {line.split(":")[0] for line in text.splitlines() if line[:1].isalpha()} - {"defaults"}
    # Chosen in the defaults list, so that another scheme can be chosen in its place.
    stated |= {"position"} if "override position:" in text else set()
    assert stated == {key for key, value in vars(option).items() if value != getattr(default, key)}


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith(("_tiny", "_mini"))])
def test_a_small_preset_takes_a_step(name: str) -> None:
    option = preset(name)
    assert option.init_scale == pytest.approx(option.hidden**-0.5, rel=0.01)
    model = PretrainingModel(option, 101, 0, pair=True)
    initialise(model, 0)
    ids = torch.arange(1, 17).expand(2, 16)
    batch = {"input_ids": ids, "segment_ids": (ids > 8).long(), "attention_mask": ids > 0}
    batch |= {"target_positions": torch.tensor([[3, 9]] * 2), "target_ids": torch.tensor([[4, 10]] * 2)}
    sums = model({**batch, "pair_labels": torch.tensor([0, 1])})
    (sums.mlm_loss + sums.pair_loss).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert bool(parameter.grad.isfinite().all()), parameter_name
    # At the start no word is favoured by much.
    assert 3.5 < float(sums.mlm_loss.detach()) / 4 < 7
