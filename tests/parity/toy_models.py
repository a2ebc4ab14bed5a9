"""Pairs of toy models, one of Hugging Face's and ours with its weights, and the batches to compare them on.

All dimensions are distinct, so that no transposed axis can pass. The weights are large enough (scale 0.2; norms round
1, so that activations are too) that attention is far from uniform, and biases are random as well.

Shapes: B sequences, S positions, V vocabulary, K targets a sequence, H hidden.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import further_families as further
import torch
import transformers
from torch import Tensor

from clozelab.models.encoder import EncoderOption
from clozelab.models.hf import family_of, from_hf_state, hf_config
from clozelab.models.hf.maps import FAMILIES, Family
from clozelab.models.hf.state import made_of, theirs_of
from clozelab.models.positions.learned import LearnedOption
from clozelab.models.positions.rope import RopeOption
from clozelab.models.positions.sinusoidal import SinusoidalOption
from clozelab.models.positions.t5_bias import T5BiasOption
from clozelab.models.pretraining import PretrainingModel

B, S, V, K = 5, 7, 99, 3
H, E, LENGTH = 36, 11, 17

BERT = EncoderOption(hidden=H, layers=3, heads=4, ffn=53, position=LearnedOption(LENGTH))
ROBERTA = replace(BERT, position=LearnedOption(LENGTH, offset=2), segments=1, norm_eps=1e-5)
ALBERT = replace(BERT, embedding=E, share="all", activation="gelu_new")
DISTILBERT = replace(BERT, segments=0)
ELECTRA = replace(BERT, embedding=E)
# Four layers: global, local, local, global, where the window leaves out more than half. Rotated heads are even: 40 / 4.
MODERNBERT = EncoderOption(
    hidden=40,
    layers=4,
    heads=4,
    ffn=53,
    activation="geglu",
    gated_width="ffn",
    position=RopeOption(theta=160.0, local_theta=10.0),
    window=4,
    segments=0,
    norm_place="pre",
    norm_eps=1e-5,
    first_norm=False,
    bias=False,
)
T5 = EncoderOption(
    hidden=H,
    layers=3,
    heads=4,
    ffn=53,
    activation="relu",
    position=T5BiasOption(buckets=16, furthest=6),
    segments=0,
    embedding_norm=False,
    norm="rmsnorm",
    norm_place="pre",
    norm_eps=1e-6,
    bias=False,
)
# T5 does not divide scores by the root of the head's width: our queries do it, and smaller weights make up for it.
T5_SCALES = {"query_scale": (H // 4) ** 0.5, "weight_scale": 0.2 / (H // 4) ** 0.25}
T5_CONFIG: dict[str, Any] = {
    "vocab_size": V,
    "d_model": H,
    "d_kv": H // 4,
    "num_heads": 4,
    "num_layers": 3,
    "d_ff": 53,
    "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 6,
}
EUROBERT = replace(
    T5,
    hidden=40,
    kv_heads=2,
    activation="swiglu",
    gated_width="ffn",
    position=RopeOption(theta=250.0),
    norm_eps=1e-5,
)
EUROBERT_CONFIG: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 53,
    "rope_parameters": {"rope_type": "default", "rope_theta": 250.0},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}


@dataclass(frozen=True)
class Case:
    """A class of Hugging Face's and an option of ours that says the same."""

    theirs: str
    option: EncoderOption
    pad_id: int = 0
    pair: bool = False
    """They are compared with their pair heads."""
    family: Family | None = None
    """The map; None: that of `family_of(option)`."""
    encoder: str | None = None
    """The hidden states are compared, of this attribute of theirs ("": of itself); None: the logits."""
    config: dict[str, Any] = field(default_factory=dict)
    """Settings of theirs beyond, or for a family that is not exported in place of, those of `hf_config`."""
    query_scale: float = 1.0
    """Our query weights are theirs times this."""
    weight_scale: float = 0.2
    """Standard deviation of the random weights."""

    @property
    def map(self) -> Family:
        """Whose names they use."""
        return self.family or FAMILIES[family_of(self.option)]

    def build(self) -> tuple[Any, PretrainingModel]:
        """(theirs, ours) with the same random weights, in eval mode."""
        if self.family is None:
            config = transformers.AutoConfig.for_model(**hf_config(self.option, V, self.pad_id) | self.config)
        else:
            config = transformers.AutoConfig.for_model(self.family.model_type, **self.config)
        theirs = getattr(transformers, self.theirs)(config)
        generator = torch.Generator().manual_seed(3)
        fixed = "position_embeddings.weight" if isinstance(self.option.position, SinusoidalOption) else "nothing"
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                if not name.endswith(fixed):
                    scale_of_norm = parameter.ndim == 1 and name.endswith("weight")
                    parameter.normal_(float(scale_of_norm), self.weight_scale, generator=generator)
        ours = PretrainingModel(self.option, V, self.pad_id, pair=self.pair)
        if self.family is None and self.encoder is None:
            ours.load_state_dict(from_hf_state(theirs.state_dict(), self.option, self.pair))
        else:
            names = [name for name in ours.state_dict() if self.encoder is None or name.startswith("encoder.")]
            state = self.ours_of(theirs.state_dict(), names, self.query_scale)
            missing, unexpected = ours.load_state_dict(state, strict=False)
            assert not unexpected
            assert all(name.startswith("mlm.") and name not in names for name in missing), missing
        return theirs.eval(), ours.eval()

    def ours_of(self, state: dict[str, Tensor], names: list[str], query_scale: float = 1.0) -> dict[str, Tensor]:
        """Our parameters of a state of theirs, or our gradients of theirs."""
        state = dict(state)
        if self.option.tie_output and self.encoder is None:
            tied = [
                theirs_of(name, self.option, self.map)[0] for name in ("encoder.embeddings.token.weight", "mlm.weight")
            ]
            # A list of parameters names it once, by the module that it meets first.
            state |= dict.fromkeys(tied, next(state[name] for name in tied if name in state))
        for copy, original in self.map.copies.items():
            if copy in state:
                state[original] = state[copy]
        result = made_of(state, names, self.option, self.map)
        for name, value in result.items():
            if ".attention.qkv." in name:
                scale = torch.ones(len(value))
                scale[: self.option.hidden] = query_scale
                result[name] = value * scale.view(-1, *(1,) * (value.ndim - 1))
        return result


def _config(option: EncoderOption, pad_id: int = 0) -> dict[str, Any]:
    return {key: value for key, value in hf_config(option, V, pad_id).items() if key != "model_type"}


CASES = {
    "BertForPreTraining": Case("BertForPreTraining", BERT, pair=True),
    "BertForMaskedLM": Case("BertForMaskedLM", BERT),
    "BertForMaskedLM, untied, ReLU": Case("BertForMaskedLM", replace(BERT, tie_output=False, activation="relu")),
    "RobertaForMaskedLM": Case("RobertaForMaskedLM", ROBERTA, pad_id=1),
    "AlbertForPreTraining": Case("AlbertForPreTraining", ALBERT, pair=True),
    "AlbertForMaskedLM": Case("AlbertForMaskedLM", ALBERT),
    "AlbertForMaskedLM, 2 groups": Case("AlbertForMaskedLM", replace(ALBERT, layers=6, share_groups=2)),
    "AlbertForMaskedLM, 2 groups of 2": Case(
        "AlbertForMaskedLM", replace(ALBERT, layers=8, share_groups=2, share_inner=2)
    ),
    "AlbertForMaskedLM, not shared": Case("AlbertForMaskedLM", replace(ALBERT, share="none", project=True)),
    "AlbertForMaskedLM, E = H": Case("AlbertForMaskedLM", replace(ALBERT, embedding=None, project=True)),
    "DistilBertForMaskedLM": Case("DistilBertForMaskedLM", DISTILBERT),
    "DistilBertForMaskedLM, sinusoidal": Case(
        "DistilBertForMaskedLM", replace(DISTILBERT, position=SinusoidalOption(), activation="relu")
    ),
    "ElectraForMaskedLM": Case("ElectraForMaskedLM", ELECTRA),
    "ElectraForPreTraining, encoder": Case("ElectraForPreTraining", ELECTRA, encoder="electra"),
    "ModernBertForMaskedLM": Case("ModernBertForMaskedLM", MODERNBERT),
    "ModernBertForMaskedLM, SwiGLU, biases": Case(
        "ModernBertForMaskedLM",
        replace(MODERNBERT, activation="swiglu", bias=True, window=2, global_every=2),
    ),
    "XLMRobertaForMaskedLM": Case(
        "XLMRobertaForMaskedLM", ROBERTA, pad_id=1, family=further.XLM_ROBERTA, config=_config(ROBERTA, 1)
    ),
    "ErnieForMaskedLM": Case(
        "ErnieForMaskedLM",
        replace(BERT, activation="relu"),
        family=further.ERNIE,
        config=_config(replace(BERT, activation="relu")),
    ),
    "RobertaPreLayerNormForMaskedLM": Case(
        "RobertaPreLayerNormForMaskedLM",
        replace(ROBERTA, norm_place="pre"),
        pad_id=1,
        family=further.ROBERTA_PRE,
        config=_config(ROBERTA, 1),
    ),
    "T5EncoderModel": Case("T5EncoderModel", T5, family=further.T5, encoder="", config=T5_CONFIG, **T5_SCALES),
    "T5EncoderModel, v1.1": Case(
        "T5EncoderModel",
        replace(T5, activation="geglu", gated_width="ffn"),
        family=further.T5_GATED,
        encoder="",
        # "gated-gelu" is the tanh approximation: the exact one has to be set by hand.
        config=T5_CONFIG | {"feed_forward_proj": "gated-silu", "dense_act_fn": "gelu"},
        **T5_SCALES,
    ),
    "EuroBertModel": Case("EuroBertModel", EUROBERT, family=further.EUROBERT, encoder="", config=EUROBERT_CONFIG),
}
EXPORTED = {name: case for name, case in CASES.items() if case.family is None and case.encoder is None}


def toy_batch(pad_id: int, segments: int, padded: bool) -> dict[str, Tensor]:
    """A batch in our form."""
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


def labels_of(batch: dict[str, Tensor]) -> Tensor:
    """[B, S]: Hugging Face's form of the targets."""
    labels = torch.full((B, S), -100)
    for b in range(B):
        for k in range(K):
            if batch["target_ids"][b, k] >= 0:
                labels[b, batch["target_positions"][b, k]] = batch["target_ids"][b, k]
    return labels
