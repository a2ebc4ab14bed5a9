"""Maps of model types that no option is exported to, as in hf.maps: further evidence that single axes are right."""

from clozelab.models.hf.maps import BERT, ROBERTA, Family, Names


def _under(names: dict[str, Names], old: str, new: str) -> dict[str, Names]:
    def renamed(name: str) -> str:
        return new + name.removeprefix(old) if name.startswith(old) else name

    return {
        ours: renamed(theirs) if isinstance(theirs, str) else tuple(map(renamed, theirs))
        for ours, theirs in names.items()
    }


ERNIE = Family("ernie", "ErnieForMaskedLM", _under(dict(BERT.names), "bert.", "ernie."), copies=BERT.copies)

XLM_ROBERTA = Family("xlm-roberta", "XLMRobertaForMaskedLM", ROBERTA.names, copies=ROBERTA.copies)

_PRE_LAYER = "roberta_prelayernorm.encoder.layer.*"
ROBERTA_PRE = Family(
    "roberta-prelayernorm",
    "RobertaPreLayerNormForMaskedLM",
    _under(dict(ROBERTA.names), "roberta.", "roberta_prelayernorm.")
    | {
        "encoder.blocks.*.attention_norm": f"{_PRE_LAYER}.attention.LayerNorm",
        "encoder.blocks.*.ffn_norm": f"{_PRE_LAYER}.intermediate.LayerNorm",
        "encoder.norm": "roberta_prelayernorm.LayerNorm",
    },
    copies=ROBERTA.copies,
)

_T5_LAYER = "encoder.block.*.layer"
T5 = Family(
    "t5",
    "T5EncoderModel",
    {
        "encoder.embeddings.token": "shared",
        # The first layer holds the table of all.
        "encoder.embeddings.position.weight": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "encoder.blocks.*.attention.qkv": tuple(f"{_T5_LAYER}.0.SelfAttention.{part}" for part in "qkv"),
        "encoder.blocks.*.attention.output": f"{_T5_LAYER}.0.SelfAttention.o",
        "encoder.blocks.*.attention_norm": f"{_T5_LAYER}.0.layer_norm",
        "encoder.blocks.*.ffn.up": f"{_T5_LAYER}.1.DenseReluDense.wi",
        "encoder.blocks.*.ffn.down": f"{_T5_LAYER}.1.DenseReluDense.wo",
        "encoder.blocks.*.ffn_norm": f"{_T5_LAYER}.1.layer_norm",
        "encoder.norm": "encoder.final_layer_norm",
    },
)

# T5 1.1: a gated layer, its two first matrices apart.
T5_GATED = Family(
    "t5",
    "T5EncoderModel",
    {
        **T5.names,
        "encoder.blocks.*.ffn.up": tuple(f"{_T5_LAYER}.1.DenseReluDense.wi_{half}" for half in (0, 1)),
    },
)

_EURO_LAYER = "layers.*"
EUROBERT = Family(
    "eurobert",
    "EuroBertModel",
    {
        "encoder.embeddings.token": "embed_tokens",
        "encoder.blocks.*.attention.qkv": tuple(f"{_EURO_LAYER}.self_attn.{part}_proj" for part in "qkv"),
        "encoder.blocks.*.attention.output": f"{_EURO_LAYER}.self_attn.o_proj",
        "encoder.blocks.*.attention_norm": f"{_EURO_LAYER}.input_layernorm",
        "encoder.blocks.*.ffn.up": (f"{_EURO_LAYER}.mlp.gate_proj", f"{_EURO_LAYER}.mlp.up_proj"),
        "encoder.blocks.*.ffn.down": f"{_EURO_LAYER}.mlp.down_proj",
        "encoder.blocks.*.ffn_norm": f"{_EURO_LAYER}.post_attention_layernorm",
        "encoder.norm": "norm",
    },
)
