"""`clozelab import`: what a folder in the Hugging Face layout is here, and how a run starts from it."""

import shlex
from pathlib import Path

from clozelab.data.formats.segment_pair import SegmentPair
from clozelab.data.tokenizers import FileOption
from clozelab.models.encoder import EncoderOption
from clozelab.models.overrides import differences
from clozelab.models.pretrained import PARTS, read_pretrained
from clozelab.options import discover


def show(folder: Path) -> int:
    """Check that a run could start from the folder, and print how.

    Raises:
        ValueError: none could: files, a setting, parameters or the vocabulary are in the way, and named.
    """
    discover("clozelab.models")
    pretrained = read_pretrained(folder)
    model = pretrained.skeleton(pretrained.option)
    translated = pretrained.translate(model)
    overrides = [f"init_from={folder}", "model=encoder"]
    for difference in differences(EncoderOption(), pretrained.option, training=True):
        overrides += [override for override in difference.overrides if override not in overrides]
    longest = pretrained.option.position.longest
    if longest is not None and longest < SegmentPair().max_length:
        overrides.append(f"format.max_length={longest}")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    known = [name for name, _ in model.named_parameters()]
    heads = [
        part for part in PARTS if part not in translated.new and any(name.startswith(f"{part}.") for name in known)
    ]
    print(f"{folder}: {pretrained.config['model_type']}, {parameters:,} parameters with all heads")
    print(f"heads that are there: {', '.join(heads) or 'none'}")
    if translated.new:
        print(f"heads that a run would begin anew: {', '.join(translated.new)}")
    try:
        tokenizer = FileOption(path=str(folder)).load(lambda: [], "", folder)
    except ValueError as error:
        print(f"no tokenizer of ours ({error}): give the one that its ids are of")
    else:
        if tokenizer.vocab_size != pretrained.vocab_size:
            raise ValueError(
                f"{folder} has embeddings of {pretrained.vocab_size} tokens and a tokenizer of {tokenizer.vocab_size}"
            )
        print(f"tokens: {tokenizer.vocab_size:,}")
        overrides += ["tokenizer=file", f"tokenizer.path={folder}"]
    if "replaced" in heads and "mlm" not in heads:
        overrides += ["task=replaced_tokens", "evaluation=[heldout_replaced]"]
    print(f"start from it: clozelab train {shlex.join(overrides)}")
    return 0
