"""`clozelab export`: a run as a folder that Hugging Face's classes open, and `init_from` too. Needs no transformers."""

import copy
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers.processors
from safetensors.torch import save_file

from clozelab import records
from clozelab.data.tokenizers import Tokenizer
from clozelab.models.encoder import EncoderOption
from clozelab.models.hf import hf_config, to_hf_state
from clozelab.models.pretrained import CELL, WEIGHTS
from clozelab.options import build
from clozelab.running.directories import check_room
from clozelab.running.model_card import model_card
from clozelab.running.trained import read_trained

# The families whose configuration names the ids of these tokens.
_NAMES_BORDERS = ("roberta", "albert", "modernbert")


def export(run: Path, target: Path) -> int:
    """Write config.json, model.safetensors, the tokenizer, a model card and the record of a run into a new folder.

    Args:
        run: a run directory with a checkpoint; the run need not be finished.
        target: a folder that does not exist, or is empty.

    Raises:
        ValueError: `run` is no such directory, `target` holds something, or the encoder has a setting that Hugging Face
            cannot express, which is named; nothing was written.
    """
    config, tokenizer, ours, spent = read_trained(run)
    option = build(config["model"])
    if build(config["masking"]).causal:
        raise ValueError("Hugging Face's encoders read both ways: a run of masking=causal has no class there")
    # Of a generator and a discriminator the second is what was wanted; the first is left behind.
    ours = {name: value for name, value in ours.items() if not name.startswith("generator.")}
    replaced = any(name.startswith("replaced.") for name in ours)
    described = hf_config(option, tokenizer.vocab_size, tokenizer.pad_id, replaced)
    model_type = described["model_type"]
    if model_type in _NAMES_BORDERS:
        described |= {"bos_token_id": tokenizer.cls_id, "eos_token_id": tokenizer.sep_id}
    if model_type == "modernbert":
        described |= {"cls_token_id": tokenizer.cls_id, "sep_token_id": tokenizer.sep_id}
    weights = {name: value.contiguous() for name, value in to_hf_state(ours, option, model_type).items()}
    record = next(iter(records.read_records(run / "record.json")), None)

    check_room(target, sum(value.nbytes for value in weights.values()) + 10_000_000, "the exported files")
    with _new_folder(target) as folder:
        _write_json(folder / "config.json", described)
        metadata = {"format": "pt"} | ({CELL: record.cell} if record else {})
        save_file(weights, folder / WEIGHTS, metadata=metadata)
        shutil.copymode(folder / "config.json", folder / WEIGHTS)  # the library writes it for its owner alone
        _write_tokenizer(folder, tokenizer, option, model_type, config["format"]["max_length"])
        if record is not None:
            shutil.copyfile(run / "record.json", folder / "record.json")
        card = model_card(config, option, record, spent, model_type, tokenizer, replaced)
        (folder / "README.md").write_text(card, encoding="utf-8")
    print(f"{target}: {described['architectures'][0]}, {sum(value.numel() for value in weights.values()):,} parameters")
    return 0


def _write_tokenizer(
    folder: Path, tokenizer: Tokenizer, option: EncoderOption, model_type: str, trained_length: int
) -> None:
    special = tokenizer.special_tokens
    inner = copy.deepcopy(tokenizer.inner)
    # As a format puts them in, whatever the file that the vocabulary came from did.
    inner.post_processor = tokenizers.processors.BertProcessing(
        (special["sep"], tokenizer.sep_id), (special["cls"], tokenizer.cls_id)
    )
    inner.save(str(folder / "tokenizer.json"))
    names = {f"{role}_token": token for role, token in special.items()}
    if model_type in _NAMES_BORDERS:
        names |= {"bos_token": special["cls"], "eos_token": special["sep"]}
    segments = ["token_type_ids"] if option.segments > 1 else []
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            # Where positions have no end, the length that the run has seen.
            "model_max_length": option.position.longest or trained_length,
            "model_input_names": ["input_ids", *segments, "attention_mask"],
            "padding_side": "right",
            "clean_up_tokenization_spaces": False,
            **names,
        },
    )
    _write_json(folder / "special_tokens_map.json", names)


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its place, whole, when the block succeeds.

    Raises:
        ValueError: `target` is a file, or holds something.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists already; give a folder that does not, or that is empty")
    beside = target.absolute().parent / f".{target.absolute().name}.{os.getpid()}"
    beside.mkdir(parents=True)
    try:
        yield beside
        os.replace(beside, target)  # over an empty folder, or nothing
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
