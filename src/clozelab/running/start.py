"""What a run starts from: `init_from` names a folder of weights in the Hugging Face layout, null starts from nothing.

Such a run is continued pre-training (task-adaptive, on a corpus of the task). Its encoder and its vocabulary must be
those of the folder; what differs is refused, with the overrides that make it equal, before data is read.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from clozelab.data.corpora.text import file_hash
from clozelab.data.store import cache_dir
from clozelab.data.tokenizers import Tokenizer
from clozelab.models.encoder import EncoderOption
from clozelab.models.overrides import differences
from clozelab.models.pretrained import (
    Pretrained,
    Translated,
    exported_cell,
    read_pretrained,
    weights_fingerprint,
)
from clozelab.models.pretraining import PretrainingModel
from clozelab.options import build


def start_folder(config: Mapping[str, Any]) -> Path | None:
    """The folder that a run starts from."""
    named = config.get("init_from")  # a configuration frozen by an earlier version has no such key
    return Path(named).expanduser() if named else None


def pinned(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the content of files in place of their paths, for the identity of a cell.

    Raises:
        ValueError: the folder holds no weights, or a list of phrases is not there.
    """
    pin = dict(config)
    if (folder := start_folder(config)) is not None:
        with _named():
            pin["init_from"] = weights_fingerprint(folder)
    selection = config["masking"].get("selection", {})
    if path := selection.get("path"):
        if not (file := Path(path).expanduser()).is_file():
            raise ValueError(f"masking.selection.path: no file {path}")
        pin["masking"] = config["masking"] | {"selection": selection | {"path": file_hash(file)}}
    return pin


def origin(folder: Path, weights: str) -> dict[str, str | None]:
    """What a record says of the folder: the hash of its weights, and the cell that trained them if one did."""
    return {"weights": weights, "cell": exported_cell(folder)}


def check_encoder(folder: Path, option: EncoderOption) -> Pretrained:
    """Hold what the folder's config.json says against the run's encoder.

    Raises:
        ValueError: they differ in a setting, or the folder is none of this kind; all differences are named.
    """
    with _named():
        pretrained = read_pretrained(folder)
        found = differences(option, pretrained.option)
        # Where theirs cannot do without a segment row or a projection, the weights say whether it does anything.
        decided_by_weights = {("model.segments", 0, 1), ("model.project", False, True)}
        if found := [one for one in found if (one.key, one.ours, one.theirs) not in decided_by_weights]:
            overrides = dict.fromkeys(text for difference in found for text in difference.overrides)
            raise ValueError(
                f"{folder} holds another encoder: {'; '.join(map(str, found))}; give {' '.join(overrides)}"
            )
        return pretrained


def start_state(folder: Path, model: PretrainingModel) -> Translated:
    """The state of `model` with the folder's weights in it.

    Raises:
        ValueError: they are the weights of another model; all settings, or all parameters, that differ are named.
    """
    pretrained = check_encoder(folder, model.encoder.option)
    with _named():
        return pretrained.translate(model)


@contextmanager
def _named() -> Iterator[None]:
    """Say which key an error is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"init_from: {error}") from None


def check_vocabulary(config: Mapping[str, Any]) -> None:
    """Hold the run's vocabulary against the folder's. A tokenizer that is trained is trained here, and kept.

    Raises:
        ValueError: token and row of the embedding would not belong together.
    """
    folder = start_folder(config)
    if folder is None:
        return
    corpus = build(config["corpus"])
    tokenizer = build(config["tokenizer"]).load(lambda: corpus.texts("train"), corpus.fingerprint(), cache_dir())
    with _named():
        _check_tokens(read_pretrained(folder), tokenizer)


def _check_tokens(pretrained: Pretrained, tokenizer: Tokenizer) -> None:
    its_own = pretrained.folder / "tokenizer.json"
    known = any((pretrained.folder / name).is_file() for name in ("tokenizer.json", "vocab.txt", "vocab.json"))
    way_out = f"give tokenizer=file tokenizer.path={pretrained.folder if known else 'ITS_VOCABULARY'}"
    if tokenizer.vocab_size != pretrained.vocab_size:
        raise ValueError(
            f"{pretrained.folder} has embeddings of {pretrained.vocab_size} tokens, the run's tokenizer has "
            f"{tokenizer.vocab_size}; {way_out}"
        )
    if not its_own.is_file():
        return
    ours, theirs = tokenizer.inner.get_vocab(), vocabulary(its_own)
    if ours != theirs:
        moved = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        raise ValueError(
            f"{its_own} and the run's tokenizer give {len(moved)} tokens other ids "
            f"({', '.join(map(repr, moved[:3]))}, ...); {way_out}"
        )


def vocabulary(path: Path) -> dict[str, int]:
    """Token -> id of a tokenizer.json, whatever its special tokens are called.

    Raises:
        ValueError: it is none.
    """
    try:
        found: dict[str, int] = tokenizers.Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is not a tokenizer.json: {str(error).splitlines()[0]}") from None
    return found
