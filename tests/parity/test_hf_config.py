"""config.json of Hugging Face from our option, and back."""

from dataclasses import replace
from typing import Any

import pytest

from clozelab.models.encoder import EncoderOption
from clozelab.models.hf import family_of, hf_config, option_of, to_hf_state
from clozelab.models.hf.maps import FAMILIES
from clozelab.models.positions.alibi import AlibiOption
from clozelab.models.positions.learned import LearnedOption
from clozelab.models.positions.relative_key import RelativeKeyOption
from clozelab.models.positions.rope import RopeOption
from clozelab.models.positions.sinusoidal import SinusoidalOption

transformers = pytest.importorskip("transformers", reason="parity needs transformers: pip install clozelab[hf]")
from toy_models import ALBERT, BERT, DISTILBERT, ELECTRA, EXPORTED, MODERNBERT, ROBERTA, V  # noqa: E402

DROPOUTS: dict[str, Any] = {"dropout": 0.2, "attention_dropout": 0.3, "init_scale": 0.05}
ROPE = RopeOption(theta=50.0)
# family_of -> options that come back equal.
THERE_AND_BACK = {
    "bert": [BERT, replace(BERT, activation="silu", tie_output=False, segments=1, norm_eps=1e-6, **DROPOUTS)],
    "roberta": [ROBERTA, replace(ROBERTA, segments=2), replace(ROBERTA, **DROPOUTS)],
    "albert": [
        ALBERT,
        replace(ALBERT, layers=6, share_groups=2, **DROPOUTS),
        replace(ALBERT, layers=8, share_groups=2, share_inner=2),
        replace(ALBERT, layers=4, share_groups=2, share_inner=2),
        replace(ALBERT, share="none"),
        replace(ALBERT, share="none", activation="gelu", project=True),
        replace(ALBERT, embedding=None, project=True),
    ],
    "distilbert": [
        DISTILBERT,
        replace(DISTILBERT, position=SinusoidalOption(), activation="relu", tie_output=False, **DROPOUTS),
    ],
    "electra": [ELECTRA, replace(ELECTRA, norm_eps=1e-6, segments=1, **DROPOUTS)],
    "modernbert": [
        replace(option, init_depth=True, dropout=0.0)
        for option in (
            MODERNBERT,
            replace(MODERNBERT, window=None),
            replace(MODERNBERT, window=None, position=ROPE, activation="reglu", bias=True, tie_output=False),
            replace(MODERNBERT, global_every=0, embedding_dropout=0.2, ffn_dropout=0.1),
            replace(MODERNBERT, global_every=2, layers=7),
            replace(MODERNBERT, global_every=5, layers=4),
        )
    ],
}
ALL = [(family, option) for family, options in THERE_AND_BACK.items() for option in options]


@pytest.mark.parametrize(("family", "option"), ALL)
def test_an_option_comes_back_equal(family: str, option: EncoderOption) -> None:
    assert family_of(option) == family
    config = hf_config(option, V, 1)
    assert option_of(config) == option
    # Their class, too, reads it, and says the same in its own words.
    theirs = transformers.AutoConfig.for_model(**config)
    assert option_of(theirs.to_dict()) == option


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_has_the_value_of_their_class(family: str) -> None:
    assert option_of({"model_type": family}) == option_of(transformers.AutoConfig.for_model(family).to_dict())


@pytest.mark.parametrize("name", EXPORTED)
def test_every_option_of_the_parity_tests_comes_back_as_the_same_function(name: str) -> None:
    config = hf_config(EXPORTED[name].option, V, EXPORTED[name].pad_id)
    assert hf_config(option_of(config), V, EXPORTED[name].pad_id) == config


def test_a_matched_gated_width_is_written_out() -> None:
    option = replace(MODERNBERT, gated_width="matched")
    assert option.ffn_width != option.ffn
    assert hf_config(option, V, 0)["intermediate_size"] == option.ffn_width
    assert option_of(hf_config(option, V, 0)).ffn_width == option.ffn_width


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (replace(BERT, norm="rmsnorm"), r"model\.norm=rmsnorm .* bert: layernorm has"),
        (replace(BERT, norm_place="sandwich"), r"model\.norm_place=sandwich .* bert: post has"),
        (replace(BERT, bias=False), r"model\.bias=False .* bert: true has"),
        (replace(BERT, kv_heads=2), r"model\.kv_heads=2 .* bert: null has"),
        (replace(BERT, window=4), r"model\.window=4 .* bert: null has"),
        (replace(BERT, activation="geglu"), r"model\.activation=geglu .* bert: gelu or gelu_new or relu or silu has"),
        (replace(BERT, embedding_norm=False), r"model\.embedding_norm=False .* bert"),
        (replace(BERT, position=AlibiOption()), r"model/position=alibi .* bert: learned has"),
        (replace(BERT, position=RelativeKeyOption(17)), r"model/position=relative_key .* bert"),
        (replace(BERT, position=SinusoidalOption()), r"model/position=sinusoidal .* bert"),
        (replace(BERT, tie_output=False, output=11), r"model\.output=11 .* bert"),
        (replace(DISTILBERT, position=SinusoidalOption(500.0)), r"model\.position\.base=500\.0 .* distilbert"),
        (replace(BERT, share="attention"), r"model\.share=attention .* albert: none or all has"),
        (replace(ALBERT, position=LearnedOption(17, offset=2)), r"model\.position\.offset=2 .* albert"),
        (replace(BERT, norm_place="pre"), r"model/position=learned .* modernbert: rope has"),
        (replace(MODERNBERT, segments=2), r"model\.segments=2 .* modernbert: 0 has"),
        (replace(MODERNBERT, first_norm=True), r"model\.first_norm=True .* modernbert: false has"),
        (replace(MODERNBERT, kv_heads=1), r"model\.kv_heads=1 .* modernbert"),
        (ROBERTA, r"pad_id \+ 1 = 1, ours from model\.position\.offset=2"),
    ],
)
def test_what_theirs_cannot_hold_is_refused_by_name(option: EncoderOption, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_config(option, V, 0)


def test_a_state_that_theirs_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"model\.norm=rmsnorm .* bert"):
        to_hf_state({}, replace(BERT, norm="rmsnorm"))


def test_a_window_that_no_layer_uses_is_none() -> None:
    assert option_of(hf_config(replace(BERT, window=4, global_every=1), V, 0)) == BERT


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type=None .* none of bert, roberta, albert, distilbert, electra, modernbert"),
        ({"model_type": "gpt2"}, "model_type='gpt2'"),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ({"model_type": "bert", "is_decoder": True}, "is_decoder=True"),
        ({"model_type": "bert", "hidden_act": "mish"}, "hidden_act='mish' of a Hugging Face bert .* gelu_new"),
        ({"model_type": "electra", "hidden_act": "relu"}, r"model\.activation=relu .* electra"),
        ({"model_type": "roberta", "pad_token_id": None}, "pad_token_id=None"),
        ({"model_type": "albert", "num_hidden_groups": 5}, "num_hidden_groups=5 .* num_hidden_layers=12"),
        ({"model_type": "modernbert", "norm_bias": True}, "attention_bias=None .* norm_bias=True"),
        ({"model_type": "modernbert", "classifier_activation": "silu"}, "classifier_activation='silu'"),
        (
            {"model_type": "modernbert", **dict.fromkeys(("hidden_activation", "classifier_activation"), "gelu_new")},
            "hidden_activation='gelu_new'",
        ),
        ({"model_type": "modernbert", "decoder_bias": False}, "decoder_bias=False"),
        ({"model_type": "modernbert", "layer_types": ["sliding_attention", "full_attention"] * 11}, "layer_types="),
        (
            {"model_type": "modernbert", "rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_parameters=.*only rope_type 'default'",
        ),
    ],
)
def test_a_config_that_we_cannot_follow_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        option_of(config)


def test_the_form_of_transformers_4_is_read() -> None:
    old = {"model_type": "modernbert", "global_attn_every_n_layers": 2, "global_rope_theta": 9.0, "local_rope_theta": 9}
    option = option_of(old)
    assert (option.window, option.global_every, option.position) == (128, 2, RopeOption(9.0))
