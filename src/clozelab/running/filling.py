"""`clozelab fill`: what a run's model puts in the place of [MASK]."""

from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from clozelab.data.tokenizers import Tokenizer
from clozelab.models.pretraining import PretrainingModel
from clozelab.options import build
from clozelab.running.trained import read_trained


def fill(run: Path, texts: list[str], top: int) -> int:
    """Print each text and the likeliest tokens for each of its masks.

    Args:
        run: a run directory with a checkpoint.
        texts: each with the mask token, or the word [MASK], at least once.
        top: tokens for each mask.

    Raises:
        ValueError: no such run, a run that reads from left to right, a text without a mask, or one that is too long.
    """
    if top < 1:
        raise ValueError(f"--top is {top}; give 1 or more")
    model, tokenizer = load(run)
    mask = tokenizer.special_tokens["mask"]
    console = Console(highlight=False, soft_wrap=True)
    for given in texts:
        text = given.replace("[MASK]", mask)
        if mask not in text:
            raise ValueError(f"{given!r} has no {mask}; put it where a word is to be found")
        ids = [tokenizer.cls_id, *tokenizer.encode_batch([text])[0].tolist(), tokenizer.sep_id]
        with torch.no_grad():
            hidden_1SH = model.encoder(torch.tensor([ids]), torch.zeros(1, len(ids), dtype=torch.long), None)
            assert model.mlm is not None
            at = [place for place, identifier in enumerate(ids) if identifier == tokenizer.mask_id]
            share_MV = model.mlm(hidden_1SH[0, at]).softmax(-1)
        console.print(Text(given, style="bold"))
        shares, tokens = share_MV.topk(min(top, share_MV.shape[1]))
        for share_K, token_K in zip(shares.tolist(), tokens.tolist(), strict=True):
            words = (f"{tokenizer.inner.id_to_token(i)} {share:.1%}" for share, i in zip(share_K, token_K, strict=True))
            console.print("  " + "  ".join(words))
    return 0


def load(run: Path) -> tuple[PretrainingModel, Tokenizer]:
    """The model of a run's newest checkpoint (of generator and discriminator the first), for use, and its tokenizer."""
    config, tokenizer, state, _ = read_trained(run)
    if build(config["masking"]).causal:
        raise ValueError(f"{run} was trained from left to right (masking=causal): it cannot see what is behind a mask")
    model = build(config["task"]).build(build(config["model"]), tokenizer.vocab_size, tokenizer.pad_id)
    model.load_state_dict(state)
    return model.eval().filler, tokenizer
