"""config.json of Hugging Face from our option, and our option from it.

What a trained model computes is carried over exactly or refused. What only matters while it learns (dropout, initial
values) is carried where the other side has a name for it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from clozelab.models.encoder import EncoderOption
from clozelab.models.hf.maps import DISCRIMINATOR, FAMILIES, Family
from clozelab.models.layers import ACTIVATIONS, GATED
from clozelab.models.positions.learned import LearnedOption
from clozelab.models.positions.rope import RopeOption
from clozelab.models.positions.sinusoidal import SinusoidalOption

# Rows of the tables that their classes make where ours compute, and the default of max_position_embeddings.
POSITIONS = 512

# Further names of theirs for an activation of ours.
_ACTIVATIONS = {name: name for name in ACTIVATIONS} | {"gelu_pytorch_tanh": "gelu_new", "swish": "silu"}
_GATED_OF = {inner: gated for gated, inner in GATED.items()}


def family_of(option: EncoderOption) -> str:
    """The model type of Hugging Face that comes nearest to this encoder; `hf_config` says whether it can hold it.

    Where several can, the plainest: ALBERT only for shared layers or a projection that widths do not call for, ELECTRA
    only for a factorised embedding (and only with the exact gelu, which its head always has; ALBERT with as many
    groups as layers otherwise), RoBERTa only for positions with an offset, DistilBERT only without segments.
    """
    if option.norm_place == "pre" or isinstance(option.position, RopeOption):
        return "modernbert"
    if option.share != "none" or option.projects != (option.embedding_size != option.hidden):
        return "albert"
    if option.embedding_size != option.hidden:
        # An explicit `project` asks for the class that always projects.
        return "electra" if option.activation == "gelu" and option.project is None else "albert"
    if isinstance(option.position, LearnedOption) and option.position.offset:
        return "roberta"
    # DistilBERT has a norm_eps of its own. BERT can hold another one, with a segment row of zeros.
    if option.segments == 0 and option.norm_eps == 1e-12:
        return "distilbert"
    return "bert"


def check(option: EncoderOption, family: Family) -> None:
    """Refuse an encoder that a family cannot hold.

    Raises:
        ValueError: names the setting, its value and the family.
    """
    same = {
        "embedding": None if option.embedding_size == option.hidden else option.embedding,
        "project": None if option.projects == (option.embedding_size != option.hidden) else option.project,
        "output": None if option.output_width == option.embedding_size else option.output,
        "kv_heads": None if option.key_value_heads == option.heads else option.kv_heads,
        "window": None if all(option.window_of(n) is None for n in range(option.layers)) else option.window,
        "position": _scheme(option),
    }
    for key, able in family.needs.items():
        value = same.get(key, getattr(option, key))
        if value not in able:
            can = " or ".join("null" if one is None else str(one).lower() for one in able)
            name = "model/position" if key == "position" else f"model.{key}"
            raise ValueError(f"{name}={value} has no counterpart in Hugging Face's {family.model_type}: {can} has")
    position = option.position
    if isinstance(position, SinusoidalOption) and position.base != 10_000:
        raise _refused("model.position.base", position.base, family)
    if isinstance(position, LearnedOption) and position.offset and family.model_type != "roberta":
        raise _refused("model.position.offset", position.offset, family)


def _scheme(option: EncoderOption) -> str:
    """The name of the position scheme: that of its file."""
    return type(option.position).__module__.rpartition(".")[2]


def _refused(key: str, value: Any, family: Family) -> ValueError:
    return ValueError(f"{key}={value} has no counterpart in Hugging Face's {family.model_type}")


def hf_config(option: EncoderOption, vocab_size: int, pad_id: int, replaced: bool = False) -> dict[str, Any]:
    """What belongs into config.json, with the masked-language-model class as the architecture, or with `replaced` the
    class that tells replaced tokens.

    Raises:
        ValueError: the nearest family cannot hold this encoder; names the setting, its value and the family.
    """
    family = FAMILIES[DISCRIMINATOR if replaced else family_of(option)]
    check(option, family)
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.discriminator if replaced else family.architecture],
        "vocab_size": vocab_size,
        "pad_token_id": pad_id,
    }
    config |= {theirs: _written(option, ours) for theirs, (ours, _) in family.settings.items()}
    return config | _WRITE[family.model_type](option, pad_id)


def option_of(config: Mapping[str, Any]) -> EncoderOption:
    """The encoder that a config.json of Hugging Face describes; keys that mean nothing to us are passed over.

    For an option that `hf_config` accepts, `option_of(hf_config(option, ...))` describes the same function, and is
    equal to it unless the same can be said in two ways (gated_width: it comes back as "ffn"; no segments: as one, whose
    row is zero) or theirs has no word for it (dropout inside BERT's feed-forward layer, the scheme of initial values).

    Raises:
        ValueError: an unknown model type, or a setting that we cannot take; names it and its value.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"model_type={model_type!r} of a Hugging Face config is none of {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    for key, value in family.only.items():
        if config.get(key, value) != value:
            raise _unknown(config, key, f"only {value!r} has")
    fields: dict[str, Any] = dict(family.always)
    for theirs, (ours, default) in family.settings.items():
        value = config.get(theirs, default)
        fields[ours] = float(value) if isinstance(default, float) else value
        if ours == "activation":
            if value not in _ACTIVATIONS:
                raise _unknown(config, theirs, f"{', '.join(_ACTIVATIONS)} have")
            fields[ours] = _ACTIVATIONS[value]
    fields |= _READ[model_type](config, fields)
    if fields.get("embedding") == fields["hidden"]:
        fields["embedding"] = None
    if fields.get("embedding_dropout") == fields["dropout"]:
        fields["embedding_dropout"] = None
    option = EncoderOption(**fields)
    check(option, family)
    # Their ALBERT always projects. Where nothing else tells that this is one, the option says so.
    if model_type == "albert" and not (option.projects and family_of(option) == "albert"):
        option.project = True
    return option


def _unknown(config: Mapping[str, Any], key: str, able: str) -> ValueError:
    return ValueError(f"{key}={config.get(key)!r} of a Hugging Face {config['model_type']} has no counterpart: {able}")


def _written(option: EncoderOption, key: str) -> Any:
    """A field of ours as their config says it."""
    if key == "ffn":
        return option.ffn_width
    if key == "embedding":
        return option.embedding_size
    if key == "segments":
        return max(option.segments, 1)
    if key == "activation":
        return GATED.get(option.activation, option.activation)
    if key == "embedding_dropout" and option.embedding_dropout is None:
        return option.dropout
    return getattr(option, key)


# What needs more than another name: positions, and which layers are alike. For each family the settings of theirs from
# an option and the padding id, and the fields of ours from their config and the fields read so far.


def _learned(option: EncoderOption) -> LearnedOption:
    assert isinstance(option.position, LearnedOption)
    return option.position


def _write_plain(option: EncoderOption, pad_id: int) -> dict[str, Any]:
    return {"max_position_embeddings": _learned(option).length}


def _read_plain(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"position": LearnedOption(config.get("max_position_embeddings", POSITIONS))}


def _write_roberta(option: EncoderOption, pad_id: int) -> dict[str, Any]:
    position = _learned(option)
    if position.offset != pad_id + 1:
        raise ValueError(
            f"Hugging Face's roberta counts positions from pad_id + 1 = {pad_id + 1}, ours from model.position.offset="
            f"{position.offset}: make them equal"
        )
    return {"max_position_embeddings": position.length + position.offset}


def _read_roberta(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    pad_id = config.get("pad_token_id", 1)
    if not isinstance(pad_id, int):
        raise _unknown(config, "pad_token_id", "positions are counted from it, a number has")
    offset = pad_id + 1
    return {"position": LearnedOption(config.get("max_position_embeddings", POSITIONS) - offset, offset)}


def _write_albert(option: EncoderOption, pad_id: int) -> dict[str, Any]:
    shared = option.share == "all"
    return _write_plain(option, pad_id) | {
        "num_hidden_layers": option.layers // option.share_inner,
        "num_hidden_groups": option.share_groups if shared else option.layers,
        "inner_group_num": option.share_inner,
    }


def _read_albert(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    units, groups, inner = fields["layers"], config.get("num_hidden_groups", 1), config.get("inner_group_num", 1)
    if units % groups:
        raise _unknown(config, "num_hidden_groups", f"it must divide num_hidden_layers={units}")
    if inner == 1 and groups == units > 1:
        return _read_plain(config, fields)
    sharing = {"share": "all", "share_groups": groups, "share_inner": inner, "layers": units * inner}
    return _read_plain(config, fields) | sharing


def _write_distilbert(option: EncoderOption, pad_id: int) -> dict[str, Any]:
    length = option.position.longest
    return {
        "max_position_embeddings": POSITIONS if length is None else length,
        "sinusoidal_pos_embds": isinstance(option.position, SinusoidalOption),
    }


def _read_distilbert(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"position": SinusoidalOption()} if config.get("sinusoidal_pos_embds") else _read_plain(config, fields)


_MODERNBERT_BIASES = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def _write_modernbert(option: EncoderOption, pad_id: int) -> dict[str, Any]:
    position = option.position
    assert isinstance(position, RopeOption)
    local_theta = position.theta if position.local_theta is None else position.local_theta
    layers = [_GLOBAL if option.window_of(n) is None else _LOCAL for n in range(option.layers)]
    return {
        "classifier_activation": _written(option, "activation"),
        **dict.fromkeys(_MODERNBERT_BIASES, option.bias),
        "local_attention": 128 if option.window is None else option.window,
        "layer_types": layers,
        "rope_parameters": {
            _GLOBAL: {"rope_type": "default", "rope_theta": position.theta},
            _LOCAL: {"rope_type": "default", "rope_theta": local_theta},
        },
        # The same for transformers 4.
        "global_attn_every_n_layers": 1 if option.window is None else option.global_every,
        "global_rope_theta": position.theta,
        "local_rope_theta": local_theta,
        # Their defaults are ids of the released vocabulary.
        **{f"{token}_token_id": None for token in ("bos", "eos", "cls", "sep")},
    }


def _read_modernbert(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    bias = config.get("norm_bias", False)
    for key in _MODERNBERT_BIASES:
        if config.get(key, False) != bias:
            raise _unknown(config, key, f"all biases are there, or none, and norm_bias={bias}")
    inner = config.get("hidden_activation", "gelu")
    if config.get("classifier_activation", "gelu") != inner:
        raise _unknown(config, "classifier_activation", f"the head's is that of the layers, hidden_activation={inner}")
    if fields["activation"] not in _GATED_OF:
        raise _unknown(config, "hidden_activation", f"of gated layers {', '.join(_GATED_OF)} have")
    theta, local_theta = _thetas(config)
    return {
        "activation": _GATED_OF[fields["activation"]],
        "bias": bias,
        "position": RopeOption(theta, None if local_theta == theta else local_theta),
        **_windows(config, fields["layers"]),
    }


def _thetas(config: Mapping[str, Any]) -> tuple[float, float]:
    """(global, local), from the form of transformers 5 or 4."""
    of_kind = config.get("rope_parameters") or {}
    found = []
    for kind, key, default in ((_GLOBAL, "global_rope_theta", 160_000.0), (_LOCAL, "local_rope_theta", 10_000.0)):
        rope = of_kind.get(kind) or {}
        if rope.get("rope_type", "default") != "default":
            raise _unknown(config, "rope_parameters", "only rope_type 'default' has")
        found.append(float(rope.get("rope_theta", config.get(key, default))))
    return found[0], found[1]


def _windows(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """window and global_every."""
    every = config.get("global_attn_every_n_layers", 3)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [_LOCAL if n % every else _GLOBAL for n in range(layers)]
    if _LOCAL not in kinds:
        return {"window": None}
    window = config.get("local_attention", 128)
    # Several periods can say the same of few layers: first the one that is written down.
    for period in (every, 3, *range(layers + 1)):
        option = EncoderOption(layers=layers, window=window, global_every=period)
        if [_GLOBAL if option.window_of(n) is None else _LOCAL for n in range(layers)] == list(kinds):
            return {"window": window, "global_every": period}
    raise _unknown(config, "layer_types", f"{_GLOBAL} at every n-th layer from the first on has")


_WRITE: dict[str, Callable[[EncoderOption, int], dict[str, Any]]] = {
    "bert": _write_plain,
    "roberta": _write_roberta,
    "albert": _write_albert,
    "distilbert": _write_distilbert,
    "electra": _write_plain,
    "modernbert": _write_modernbert,
}
_READ: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]] = {
    "bert": _read_plain,
    "roberta": _read_roberta,
    "albert": _read_albert,
    "distilbert": _read_distilbert,
    "electra": _read_plain,
    "modernbert": _read_modernbert,
}
