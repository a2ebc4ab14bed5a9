"""What Hugging Face calls our parameters and settings, one `Family` for each model type of theirs. Data, no behaviour.

Parameters: our module -> theirs, with `*` for the number of the block (two of them: of the group, and of the layer in
it). A fused product lists its parts. Where the names of the parameters differ too, the whole name stands here.

Settings: the key of their config.json -> (our field, the value of theirs where the key is left out).

Source: the classes of transformers 5.24.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clozelab.models.layers import ACTIVATIONS, GATED

Names = str | tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """One model type of Hugging Face."""

    model_type: str
    architecture: str
    """Their class with the masked-language-model head."""
    names: Mapping[str, Names]
    """Our parameters -> theirs."""
    discriminator: str | None = None
    """Their class with the head of replaced tokens."""
    settings: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Their settings -> ours. What needs more than another name is in `config`."""
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Our fields -> the values that their class can take."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Our fields -> what their class always does."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Their settings -> the one value that we can take."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Names of a parameter of theirs that has another one too, while the output layer is tied."""
    unused: tuple[str, ...] = ()
    """How the names of parameters begin that are of no use to us."""


# Buffers that some versions save.
BUFFERS = (".position_ids", ".token_type_ids", "inv_freq")
# Names of the scale and the shift of a norm in files made from TensorFlow's.
OLD_LEAVES = {"gamma": "weight", "beta": "bias"}
# The heads of their other classes.
_OTHER_HEADS = ("classifier.", "pre_classifier.", "qa_outputs.", "discriminator_predictions.")
# A pair head without a counterpart keeps our names.
_OUR_PAIR = {"pair.pooler": "pair.pooler", "pair.classifier": "pair.classifier"}


def _embeddings(body: str) -> dict[str, Names]:
    return {
        "encoder.embeddings.token": f"{body}.embeddings.word_embeddings",
        "encoder.embeddings.position": f"{body}.embeddings.position_embeddings",
        "encoder.embeddings.segment": f"{body}.embeddings.token_type_embeddings",
        "encoder.embeddings.norm": f"{body}.embeddings.LayerNorm",
    }


def _bert_body(body: str) -> dict[str, Names]:
    layer = f"{body}.encoder.layer.*"
    return _embeddings(body) | {
        "encoder.blocks.*.attention.qkv": (
            f"{layer}.attention.self.query",
            f"{layer}.attention.self.key",
            f"{layer}.attention.self.value",
        ),
        "encoder.blocks.*.attention.output": f"{layer}.attention.output.dense",
        "encoder.blocks.*.attention_norm": f"{layer}.attention.output.LayerNorm",
        "encoder.blocks.*.ffn.up": f"{layer}.intermediate.dense",
        "encoder.blocks.*.ffn.down": f"{layer}.output.dense",
        "encoder.blocks.*.ffn_norm": f"{layer}.output.LayerNorm",
        "pair.pooler": f"{body}.pooler.dense",
    }


_BERT_HEAD: dict[str, Names] = {
    "mlm.dense": "cls.predictions.transform.dense",
    "mlm.norm": "cls.predictions.transform.LayerNorm",
    "mlm.weight": "cls.predictions.decoder.weight",
    "mlm.bias": "cls.predictions.bias",
    "pair.classifier": "cls.seq_relationship",
}

_BERT_SETTINGS: dict[str, tuple[str, Any]] = {
    "hidden_size": ("hidden", 768),
    "num_hidden_layers": ("layers", 12),
    "num_attention_heads": ("heads", 12),
    "intermediate_size": ("ffn", 3072),
    "hidden_act": ("activation", "gelu"),
    "type_vocab_size": ("segments", 2),
    "hidden_dropout_prob": ("dropout", 0.1),
    "attention_probs_dropout_prob": ("attention_dropout", 0.1),
    "initializer_range": ("init_scale", 0.02),
    "layer_norm_eps": ("norm_eps", 1e-12),
    "tie_word_embeddings": ("tie_output", True),
}
_BERT_NEEDS: dict[str, tuple[Any, ...]] = {
    "position": ("learned",),
    "embedding": (None,),
    "project": (None,),
    "embedding_norm": (True,),
    "share": ("none",),
    "kv_heads": (None,),
    "window": (None,),
    "activation": tuple(ACTIVATIONS),
    "norm": ("layernorm",),
    "norm_place": ("post",),
    "bias": (True,),
    "output": (None,),
}
_BERT_ONLY = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}

BERT = Family(
    model_type="bert",
    architecture="BertForMaskedLM",
    names=_bert_body("bert") | _BERT_HEAD,
    settings=_BERT_SETTINGS,
    needs=_BERT_NEEDS,
    only=_BERT_ONLY,
    copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    unused=("bert.pooler.", "cls.seq_relationship.", *_OTHER_HEADS),
)

ROBERTA = Family(
    model_type="roberta",
    architecture="RobertaForMaskedLM",
    names={
        **_bert_body("roberta"),
        "mlm.dense": "lm_head.dense",
        "mlm.norm": "lm_head.layer_norm",
        "mlm.weight": "lm_head.decoder.weight",
        "mlm.bias": "lm_head.bias",
        "pair.classifier": "pair.classifier",
    },
    settings=_BERT_SETTINGS,
    needs=_BERT_NEEDS,
    only=_BERT_ONLY,
    copies={"lm_head.decoder.bias": "lm_head.bias"},
    unused=("roberta.pooler.", "pair.", *_OTHER_HEADS),
)

_ALBERT_LAYER = "albert.encoder.albert_layer_groups.*.albert_layers.*"
ALBERT = Family(
    model_type="albert",
    architecture="AlbertForMaskedLM",
    names={
        **_embeddings("albert"),
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
        "mlm.dense": "predictions.dense",
        "mlm.norm": "predictions.LayerNorm",
        "mlm.weight": "predictions.decoder.weight",
        "mlm.bias": "predictions.bias",
        "pair.pooler": "albert.pooler",
        "pair.classifier": "sop_classifier.classifier",
    },
    settings={
        **_BERT_SETTINGS,
        "embedding_size": ("embedding", 128),
        "hidden_size": ("hidden", 4096),
        "num_attention_heads": ("heads", 64),
        "intermediate_size": ("ffn", 16384),
        "hidden_act": ("activation", "gelu_new"),
        "hidden_dropout_prob": ("dropout", 0.0),
        "attention_probs_dropout_prob": ("attention_dropout", 0.0),
    },
    needs={key: values for key, values in _BERT_NEEDS.items() if key not in ("embedding", "project")}
    | {"share": ("none", "all")},
    only=_BERT_ONLY,
    copies={"predictions.decoder.bias": "predictions.bias"},
    unused=("albert.pooler.", "sop_classifier.", *_OTHER_HEADS),
)

_DISTILBERT_LAYER = "distilbert.transformer.layer.*"
DISTILBERT = Family(
    model_type="distilbert",
    architecture="DistilBertForMaskedLM",
    names={
        "encoder.embeddings.token": "distilbert.embeddings.word_embeddings",
        "encoder.embeddings.position": "distilbert.embeddings.position_embeddings",
        "encoder.embeddings.norm": "distilbert.embeddings.LayerNorm",
        "encoder.blocks.*.attention.qkv": (
            f"{_DISTILBERT_LAYER}.attention.q_lin",
            f"{_DISTILBERT_LAYER}.attention.k_lin",
            f"{_DISTILBERT_LAYER}.attention.v_lin",
        ),
        "encoder.blocks.*.attention.output": f"{_DISTILBERT_LAYER}.attention.out_lin",
        "encoder.blocks.*.attention_norm": f"{_DISTILBERT_LAYER}.sa_layer_norm",
        "encoder.blocks.*.ffn.up": f"{_DISTILBERT_LAYER}.ffn.lin1",
        "encoder.blocks.*.ffn.down": f"{_DISTILBERT_LAYER}.ffn.lin2",
        "encoder.blocks.*.ffn_norm": f"{_DISTILBERT_LAYER}.output_layer_norm",
        "mlm.dense": "vocab_transform",
        "mlm.norm": "vocab_layer_norm",
        "mlm.weight": "vocab_projector.weight",
        "mlm.bias": "vocab_projector.bias",
        **_OUR_PAIR,
    },
    settings={
        "dim": ("hidden", 768),
        "n_layers": ("layers", 6),
        "n_heads": ("heads", 12),
        "hidden_dim": ("ffn", 3072),
        "activation": ("activation", "gelu"),
        "dropout": ("dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.1),
        "initializer_range": ("init_scale", 0.02),
        "tie_word_embeddings": ("tie_output", True),
    },
    needs=_BERT_NEEDS | {"position": ("learned", "sinusoidal"), "segments": (0,), "norm_eps": (1e-12,)},
    always={"segments": 0, "norm_eps": 1e-12},
    unused=("pair.", *_OTHER_HEADS),
)

ELECTRA = Family(
    model_type="electra",
    architecture="ElectraForMaskedLM",
    discriminator="ElectraForPreTraining",
    names={
        **_bert_body("electra"),
        "encoder.embeddings.project": "electra.embeddings_project",
        "mlm.dense": "generator_predictions.dense",
        "mlm.norm": "generator_predictions.LayerNorm",
        "mlm.weight": "generator_lm_head.weight",
        "mlm.bias": "generator_lm_head.bias",
        "replaced.dense": "discriminator_predictions.dense",
        "replaced.output": "discriminator_predictions.dense_prediction",
        **_OUR_PAIR,
    },
    settings={
        **_BERT_SETTINGS,
        "embedding_size": ("embedding", 128),
        "hidden_size": ("hidden", 256),
        "num_attention_heads": ("heads", 4),
        "intermediate_size": ("ffn", 1024),
    },
    # Whatever the activation of the layers, that of the generator's head is the exact gelu.
    needs={key: values for key, values in _BERT_NEEDS.items() if key != "embedding"} | {"activation": ("gelu",)},
    only=_BERT_ONLY,
    unused=("pair.", *_OTHER_HEADS),
)

MODERNBERT = Family(
    model_type="modernbert",
    architecture="ModernBertForMaskedLM",
    names={
        "encoder.embeddings.token": "model.embeddings.tok_embeddings",
        "encoder.embeddings.norm": "model.embeddings.norm",
        "encoder.blocks.*.attention.qkv": "model.layers.*.attn.Wqkv",
        "encoder.blocks.*.attention.output": "model.layers.*.attn.Wo",
        "encoder.blocks.*.attention_norm": "model.layers.*.attn_norm",
        "encoder.blocks.*.ffn.up": "model.layers.*.mlp.Wi",
        "encoder.blocks.*.ffn.down": "model.layers.*.mlp.Wo",
        "encoder.blocks.*.ffn_norm": "model.layers.*.mlp_norm",
        "encoder.norm": "model.final_norm",
        "mlm.dense": "head.dense",
        "mlm.norm": "head.norm",
        "mlm.weight": "decoder.weight",
        "mlm.bias": "decoder.bias",
        **_OUR_PAIR,
    },
    settings={
        "hidden_size": ("hidden", 768),
        "num_hidden_layers": ("layers", 22),
        "num_attention_heads": ("heads", 12),
        "intermediate_size": ("ffn", 1152),
        "hidden_activation": ("activation", "gelu"),
        "embedding_dropout": ("embedding_dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
        "mlp_dropout": ("ffn_dropout", 0.0),
        "initializer_range": ("init_scale", 0.02),
        "norm_eps": ("norm_eps", 1e-5),
        "tie_word_embeddings": ("tie_output", True),
    },
    needs={key: values for key, values in _BERT_NEEDS.items() if key not in ("bias", "window")}
    | {
        "position": ("rope",),
        "segments": (0,),
        "activation": tuple(GATED),
        "norm_place": ("pre",),
        "first_norm": (False,),
    },
    # Their class initialises as init_depth does, and has no dropout on the residual stream.
    always={
        "segments": 0,
        "norm_place": "pre",
        "first_norm": False,
        "gated_width": "ffn",
        "dropout": 0.0,
        "init_depth": True,
    },
    only={"decoder_bias": True},
    unused=("pair.", *_OTHER_HEADS),
)

# The family that has a class for the head of replaced tokens.
DISCRIMINATOR = ELECTRA.model_type

FAMILIES = {family.model_type: family for family in (BERT, ROBERTA, ALBERT, DISTILBERT, ELECTRA, MODERNBERT)}
