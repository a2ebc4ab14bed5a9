"""Numbers of parameters of published models, as settings of our encoder: equal to the unit.

Where no other source is named the number is Hugging Face's: its classes in transformers 5.24 on the meta device, tied
weights counted once. The models that are presets are in tests/contract/test_model_presets.py.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from clozelab.models.encoder import EncoderOption
from clozelab.models.positions.learned import LearnedOption
from clozelab.models.positions.rope import RopeOption
from clozelab.models.positions.t5_bias import T5BiasOption
from clozelab.models.pretraining import PretrainingModel

BERT = EncoderOption()
ALBERT = EncoderOption(embedding=128, share="all")
# An embedding as wide as the layers is projected all the same, as in Hugging Face's class.
WIDE = EncoderOption(project=True)

# (option, vocabulary) -> encoder and pooler.
WITH_POOLER = {
    "bert-base-cased": (BERT, 28996, 108_310_272),
    "albert-base E=64 all-shared": (replace(ALBERT, embedding=64), 30000, 9_681_408),
    "albert-base E=64 not-shared": (replace(ALBERT, embedding=64, share="none"), 30000, 87_648_000),
    "albert-base E=128 all-shared": (ALBERT, 30000, 11_683_584),
    "albert-base E=128 not-shared": (replace(ALBERT, share="none"), 30000, 89_650_176),
    "albert-base E=256 all-shared": (replace(ALBERT, embedding=256), 30000, 15_687_936),
    "albert-base E=256 not-shared": (replace(ALBERT, embedding=256, share="none"), 30000, 93_654_528),
    "albert-base E=768 all-shared": (replace(WIDE, share="all"), 30000, 31_705_344),
    "albert-base E=768 not-shared": (WIDE, 30000, 109_671_936),
    **{
        f"albert 3-layer H={hidden}": (
            replace(ALBERT, layers=3, hidden=hidden, ffn=4 * hidden, heads=hidden // 64),
            30000,
            published,
        )
        for hidden, published in ((1024, 17_683_968), (2048, 58_724_864), (4096, 222_595_584), (6144, 495_518_208))
    },
    # By the formula of the sizes; ALBERT (Lan et al. 2020), table 4, prints 83M, 57M, 64M and 38M.
    "albert-base E=768 shared-attention": (replace(WIDE, share="attention"), 30000, 83_668_992),
    "albert-base E=768 shared-ffn": (replace(WIDE, share="ffn"), 30000, 57_708_288),
    "albert-base E=128 shared-attention": (replace(ALBERT, share="attention"), 30000, 63_647_232),
    "albert-base E=128 shared-ffn": (replace(ALBERT, share="ffn"), 30000, 37_686_528),
}
# (option, vocabulary) -> encoder alone. Of models that look back alone the blocks are meant: a mask has no parameters.
BARE = {
    "t5-base encoder": (
        EncoderOption(
            activation="relu",
            position=T5BiasOption(),
            segments=0,
            embedding_norm=False,
            norm="rmsnorm",
            norm_place="pre",
            bias=False,
        ),
        32128,
        109_628_544,
    ),
    "openai-gpt": (EncoderOption(segments=0, embedding_norm=False), 40478, 116_534_784),
    "gpt2": (
        EncoderOption(position=LearnedOption(1024), segments=0, embedding_norm=False, norm_place="pre"),
        50257,
        124_439_808,
    ),
    "llama-1-7b": (
        EncoderOption(
            hidden=4096,
            layers=32,
            heads=32,
            ffn=11008,
            activation="swiglu",
            gated_width="ffn",
            position=RopeOption(),
            segments=0,
            embedding_norm=False,
            norm="rmsnorm",
            norm_place="pre",
            bias=False,
        ),
        32000,
        6_607_343_616,
    ),
}
# XLM: its output layer is the token embedding and a bias a word, without the transformation that BERT's head has.
XLM = (EncoderOption(hidden=2048, heads=16, ffn=8192, segments=0), 30145, 667_119_041)


def numbers(*modules: nn.Module | None) -> int:
    return sum(parameter.numel() for module in modules if module is not None for parameter in module.parameters())


def meta(option: EncoderOption, vocab: int) -> PretrainingModel:
    with torch.device("meta"):
        return PretrainingModel(option, vocab, 0, pair=True)


@pytest.mark.parametrize("name", WITH_POOLER)
def test_encoder_and_pooler(name: str) -> None:
    option, vocab, published = WITH_POOLER[name]
    model = meta(option, vocab)
    assert model.pair is not None
    assert numbers(model.encoder, model.pair.pooler) == published


@pytest.mark.parametrize("name", BARE)
def test_encoder_alone(name: str) -> None:
    option, vocab, published = BARE[name]
    assert numbers(meta(option, vocab).encoder) == published


def test_bert_base_cased_with_its_heads() -> None:
    model = meta(BERT, 28996)
    assert numbers(model) == 108_932_934
    assert numbers(model.encoder, model.mlm) - numbers(model.encoder.embeddings.token) == 108_340_804


def test_xlm() -> None:
    option, vocab, published = XLM
    assert numbers(meta(option, vocab).encoder) + vocab == published
