"""Weights and configuration in the Hugging Face layout and back, for BERT, RoBERTa and ALBERT. Needs no transformers.

The map is data: our module -> theirs, `*` standing for the number of the block. A fused product lists its parts.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clozelab.models.encoder import EncoderOption
from clozelab.models.positions.learned import LearnedOption

Names = str | tuple[str, ...]

_BERT_BODY: dict[str, Names] = {
    "encoder.embeddings.token": "bert.embeddings.word_embeddings",
    "encoder.embeddings.position": "bert.embeddings.position_embeddings",
    "encoder.embeddings.segment": "bert.embeddings.token_type_embeddings",
    "encoder.embeddings.norm": "bert.embeddings.LayerNorm",
    "encoder.blocks.*.attention.qkv": (
        "bert.encoder.layer.*.attention.self.query",
        "bert.encoder.layer.*.attention.self.key",
        "bert.encoder.layer.*.attention.self.value",
    ),
    "encoder.blocks.*.attention.output": "bert.encoder.layer.*.attention.output.dense",
    "encoder.blocks.*.attention_norm": "bert.encoder.layer.*.attention.output.LayerNorm",
    "encoder.blocks.*.ffn.up": "bert.encoder.layer.*.intermediate.dense",
    "encoder.blocks.*.ffn.down": "bert.encoder.layer.*.output.dense",
    "encoder.blocks.*.ffn_norm": "bert.encoder.layer.*.output.LayerNorm",
    "pair.pooler": "bert.pooler.dense",
}
_ALBERT_LAYER = "albert.encoder.albert_layer_groups.*.albert_layers.0"


def _renamed(names: Names, old: str, new: str) -> Names:
    if isinstance(names, tuple):
        return tuple(name.replace(old, new, 1) for name in names)
    return names.replace(old, new, 1)


MODULES: dict[str, Mapping[str, Names]] = {
    "bert": {
        **_BERT_BODY,
        "mlm.dense": "cls.predictions.transform.dense",
        "mlm.norm": "cls.predictions.transform.LayerNorm",
        "mlm": "cls.predictions",
        "pair.classifier": "cls.seq_relationship",
    },
    # RoBERTa has no class with a pair head: its classifier keeps our name.
    "roberta": {
        **{ours: _renamed(theirs, "bert.", "roberta.") for ours, theirs in _BERT_BODY.items()},
        "mlm.dense": "lm_head.dense",
        "mlm.norm": "lm_head.layer_norm",
        "mlm": "lm_head",
        "pair.classifier": "pair.classifier",
    },
    "albert": {
        "encoder.embeddings.token": "albert.embeddings.word_embeddings",
        "encoder.embeddings.position": "albert.embeddings.position_embeddings",
        "encoder.embeddings.segment": "albert.embeddings.token_type_embeddings",
        "encoder.embeddings.norm": "albert.embeddings.LayerNorm",
        "encoder.embeddings.project": "albert.encoder.embedding_hidden_mapping_in",
        "encoder.blocks.*.attention.qkv": (
            f"{_ALBERT_LAYER}.attention.query",
            f"{_ALBERT_LAYER}.attention.key",
            f"{_ALBERT_LAYER}.attention.value",
        ),
        "encoder.blocks.*.attention.output": f"{_ALBERT_LAYER}.attention.dense",
        "encoder.blocks.*.attention_norm": f"{_ALBERT_LAYER}.attention.LayerNorm",
        "encoder.blocks.*.ffn.up": f"{_ALBERT_LAYER}.ffn",
        "encoder.blocks.*.ffn.down": f"{_ALBERT_LAYER}.ffn_output",
        "encoder.blocks.*.ffn_norm": f"{_ALBERT_LAYER}.full_layer_layer_norm",
        "pair.pooler": "albert.pooler",
        "mlm.dense": "predictions.dense",
        "mlm.norm": "predictions.LayerNorm",
        "mlm": "predictions",
        "pair.classifier": "sop_classifier.classifier",
    },
}


def _learned(option: EncoderOption) -> LearnedOption:
    assert isinstance(option.position, LearnedOption)
    return option.position


def family_of(option: EncoderOption) -> str:
    """The Hugging Face model type that can hold this encoder: "bert", "roberta" or "albert"."""
    if option.share != "none" or option.embedding_size != option.hidden:
        return "albert"
    return "roberta" if _learned(option).offset == 2 and option.segments <= 1 else "bert"


def hf_config(option: EncoderOption, vocab_size: int, pad_id: int) -> dict[str, Any]:
    """What belongs into config.json, with the masked-language-model class as the architecture.

    Raises:
        ValueError: no Hugging Face class holds this encoder.
    """
    family = family_of(option)
    if family == "roberta" and pad_id != 1:
        raise ValueError(
            f"Hugging Face's RoBERTa counts positions from pad_id + 1, ours from 2: pad_id must be 1, not {pad_id}"
        )
    if family != "roberta" and _learned(option).offset:
        raise ValueError(
            f"model.position.offset={_learned(option).offset} has no counterpart in Hugging Face's {family}"
        )
    config: dict[str, Any] = {
        "model_type": family,
        "architectures": [{"bert": "Bert", "roberta": "Roberta", "albert": "Albert"}[family] + "ForMaskedLM"],
        "vocab_size": vocab_size,
        "pad_token_id": pad_id,
        "hidden_size": option.hidden,
        "num_hidden_layers": option.layers,
        "num_attention_heads": option.heads,
        "intermediate_size": option.ffn,
        "hidden_act": option.activation,
        "max_position_embeddings": _learned(option).length + _learned(option).offset,
        "type_vocab_size": max(option.segments, 1),
        "hidden_dropout_prob": option.dropout,
        "attention_probs_dropout_prob": option.attention_dropout,
        "initializer_range": option.init_scale,
        "layer_norm_eps": option.norm_eps,
        "tie_word_embeddings": option.tie_output,
    }
    if family == "albert":
        config |= {"embedding_size": option.embedding_size, "inner_group_num": 1}
        config |= {"num_hidden_groups": 1 if option.share == "all" else option.layers}
    return config


def _pairs(option: EncoderOption, family: str, pair: bool) -> dict[str, tuple[str, ...]]:
    """Our parameter -> the parameters of theirs that it is made of, for every one that a model of ours can have."""
    blocks = range(1 if option.share == "all" else option.layers)
    result: dict[str, tuple[str, ...]] = {}
    for ours, theirs in MODULES[family].items():
        parts = (theirs,) if isinstance(theirs, str) else theirs
        for number in blocks if "*" in ours else (0,):
            for leaf in ("weight", "bias"):
                result[f"{ours}.{leaf}".replace("*", str(number))] = tuple(
                    f"{part}.{leaf}".replace("*", str(number)) for part in parts
                )
    result["mlm.weight"] = (f"{MODULES[family]['mlm']}.decoder.weight",)
    return result if pair else {ours: theirs for ours, theirs in result.items() if not ours.startswith("pair.")}


def from_hf_state(state: Mapping[str, Tensor], option: EncoderOption, pair: bool = False) -> dict[str, Tensor]:
    """The state dict of our `PretrainingModel`, made of that of BertForPreTraining, BertForMaskedLM,
    RobertaForMaskedLM, AlbertForPreTraining or AlbertForMaskedLM.

    Args:
        state: theirs; buffers and tied copies may be present or absent.
        option: describes the same model.
        pair: include the pair head.

    Raises:
        ValueError: a parameter that the option calls for is missing from the state.
    """
    family = family_of(option)
    state = dict(state)
    decoder = f"{MODULES[family]['mlm']}.decoder.weight"
    if option.tie_output:
        state.setdefault(decoder, state[f"{family}.embeddings.word_embeddings.weight"])
    result = {}
    for ours, theirs in _pairs(option, family, pair).items():
        if not option.segments and ".segment." in ours:
            continue
        if all(name in state for name in theirs):
            result[ours] = torch.cat([state[name] for name in theirs])
    model = _skeleton(option, len(state[f"{family}.embeddings.word_embeddings.weight"]), pair)
    missing = sorted(set(model) - set(result))
    if missing:
        raise ValueError(f"the {family} state has no value for {', '.join(missing)}")
    return {name: result[name] for name in model}


def to_hf_state(state: Mapping[str, Tensor], option: EncoderOption) -> dict[str, Tensor]:
    """The state dict of a Hugging Face model of `family_of(option)`, made of that of our `PretrainingModel`.

    The tied decoder is left out, as Hugging Face's own files do. What ours lacks and theirs cannot do without
    (segments, or the projection of an embedding as wide as the hidden state) is filled in so that it changes nothing.
    """
    family = family_of(option)
    result: dict[str, Tensor] = {}
    for ours, theirs in _pairs(option, family, pair=True).items():
        if ours in state and not (ours == "mlm.weight" and option.tie_output):
            for name, part in zip(theirs, state[ours].chunk(len(theirs)), strict=True):
                result[name] = part.clone()
    token = state["encoder.embeddings.token.weight"]
    if not option.segments:
        result[f"{family}.embeddings.token_type_embeddings.weight"] = token.new_zeros(1, option.embedding_size)
    if family == "albert" and option.embedding_size == option.hidden:
        project = "albert.encoder.embedding_hidden_mapping_in"
        result[f"{project}.weight"] = torch.eye(option.hidden, dtype=token.dtype)
        result[f"{project}.bias"] = token.new_zeros(option.hidden)
    return result


def _skeleton(option: EncoderOption, vocab_size: int, pair: bool) -> list[str]:
    from clozelab.models.pretraining import PretrainingModel

    with torch.device("meta"):
        return list(PretrainingModel(option, vocab_size, 0, pair=pair).state_dict())
