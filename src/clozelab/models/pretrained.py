"""Encoders kept in the Hugging Face layout: config.json beside model.safetensors, in one file or in several.

Such a folder is what `clozelab export` writes, what transformers' `save_pretrained` writes, and what the Hub holds.
Heads may be missing from it, and it may hold heads that a model of ours does not have; the encoder must be complete,
and everything else must be known. Needs no transformers.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from clozelab.models.encoder import EncoderOption
from clozelab.models.hf import from_hf_state, option_of
from clozelab.models.hf.maps import FAMILIES
from clozelab.models.hf.state import theirs_of
from clozelab.models.pretraining import PretrainingModel

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CELL = "clozelab.cell"
"""Key of the exported weights' metadata: the cell that trained them."""
# What a folder may hold or lack as a whole.
PARTS = ("mlm", "pair.pooler", "pair.classifier", "replaced")


@dataclass(frozen=True)
class Translated:
    """The values of a model of ours, found in a folder of theirs."""

    state: dict[str, Tensor]
    new: list[str]
    """Parts of the model that the folder does not hold; their values are the ones that were there before."""
    unused: list[str]
    """Parts in the folder that the model does not have."""


@dataclass(frozen=True)
class Pretrained:
    """A folder in the Hugging Face layout; its weights are read when they are asked for."""

    folder: Path
    config: dict[str, Any]
    """config.json."""
    option: EncoderOption
    """What config.json says, as an encoder of ours."""

    @property
    def vocab_size(self) -> int:
        """Rows of the token embedding."""
        return int(self.config["vocab_size"])

    def skeleton(self, option: EncoderOption) -> PretrainingModel:
        """A model of the folder's size with every head, on the meta device."""
        with torch.device("meta"):
            has_class = FAMILIES[self.config["model_type"]].discriminator is not None
            return PretrainingModel(option, self.vocab_size, 0, pair=True, replaced=has_class)

    def state(self) -> dict[str, Tensor]:
        """Every tensor in the folder, by the name that it has beside a head.

        Raises:
            ValueError: a file is damaged.
        """
        state: dict[str, Tensor] = {}
        for file in weight_files(self.folder):
            try:
                state |= load_file(file)
            except SafetensorError as error:
                raise ValueError(f"{file} is no whole safetensors file ({error}); copy or export it again") from None
        base = self._theirs("encoder.embeddings.token.weight", self.option).partition(".")[0]
        if not any(name.startswith(f"{base}.") for name in state):
            # An encoder saved without a head names its parameters from the encoder on.
            state = {f"{base}.{name}": value for name, value in state.items()}
        return state

    def translate(self, model: PretrainingModel) -> Translated:
        """The folder's weights as the state of `model`, which may be on the meta device.

        Parts that the folder lacks keep the values of `model`.

        Raises:
            ValueError: parameters are missing, unknown, or of other shapes; all of them are named.
        """
        option, ours, state = model.encoder.option, model.state_dict(), self.state()
        every = self.skeleton(option).state_dict()
        theirs = {name: self._theirs(name, option) for name in every if not name.startswith("encoder.")}

        def part(name: str) -> str:
            return next(part for part in PARTS if name.startswith(f"{part}."))

        present = {part(name) for name, its in theirs.items() if its in state}
        wanted = {part(name) for name in theirs if name in ours}
        new = [part for part in PARTS if part in wanted - present]
        heads = {part for part in ("mlm", "replaced") if part in present | wanted}
        for name, its in theirs.items():
            if part(name) in new and not (name == "mlm.weight" and option.tie_output):
                state[its] = ours[name]
        try:
            found = from_hf_state(
                state, option, pair=model.pair is not None, mlm="mlm" in heads, replaced="replaced" in heads
            )
        except ValueError as error:
            raise ValueError(f"{self.folder}: {error}") from None
        except RuntimeError as error:  # torch, where the parts of one matrix of ours do not fit together
            raise ValueError(f"{self.folder}: the weights fit no model of its config.json: {error}") from None
        # What no folder holds (a generator beside the encoder) keeps its values, but for what it shares with the rest.
        original = _originals(model)
        alone = [name for name in ours if original[name] not in found]
        new += sorted({name.partition(".")[0] for name in alone})
        found |= {name: found.get(original[name], value) for name, value in ours.items() if name not in found}
        wrong = [
            f"{name} is {list(found[name].shape)}, not {list(value.shape)}"
            for name, value in ours.items()
            if found[name].shape != value.shape
        ]
        if wrong:
            raise ValueError(f"{self.folder}: the weights are not those of its config.json: {'; '.join(wrong)}")
        unused = [part for part in PARTS if part in present - wanted]
        return Translated({name: found[name] for name in ours}, new, unused)

    def _theirs(self, name: str, option: EncoderOption) -> str:
        """What the folder calls a parameter of ours that is no part of a fused one."""
        (its,) = theirs_of(name, option, FAMILIES[self.config["model_type"]])
        return its


def _originals(model: PretrainingModel) -> dict[str, str]:
    """Each name of a parameter -> the first name of the same one."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in named}


def read_pretrained(folder: Path) -> Pretrained:
    """What lies in a folder.

    Raises:
        ValueError: no such folder, a file is missing or in another format, or config.json describes no encoder of ours.
    """
    config = _json(folder / "config.json")
    weight_files(folder)
    try:
        option = option_of(config)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    if not isinstance(config.get("vocab_size"), int):
        raise ValueError(f"{folder / 'config.json'} names no vocab_size")
    return Pretrained(folder, config, option)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights.

    Raises:
        ValueError: there are none, one is missing, or they are pickled.
    """
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}")
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        named = _json(folder / INDEX).get("weight_map")
        if not isinstance(named, Mapping) or not named:
            raise ValueError(f"{folder / INDEX} has no weight_map")
        files = [folder / str(name) for name in sorted(set(named.values()))]
        if missing := [file.name for file in files if not file.is_file()]:
            raise ValueError(f"{folder} lacks {', '.join(missing)}, which its {INDEX} names; copy the folder again")
        return files
    pickled = [file.name for file in sorted(folder.glob("pytorch_model*.bin"))]
    if pickled:
        raise ValueError(
            f"{folder} holds {pickled[0]}, a pickle, and no {WEIGHTS}; "
            "transformers' AutoModelForMaskedLM.from_pretrained(...).save_pretrained(...) writes it anew"
        )
    raise ValueError(f"{folder} holds no {WEIGHTS} and no {INDEX}; give a folder as `clozelab export` writes it")


def weights_fingerprint(folder: Path) -> str:
    """Hash of the weights, whatever the folder is called.

    Raises:
        ValueError: as `weight_files`.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in weight_files(folder):
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def exported_cell(folder: Path) -> str | None:
    """The cell whose weights these are. It stands in the weights' own file, which others write without it."""
    files = weight_files(folder)
    if len(files) > 1:
        return None
    try:
        with safe_open(files[0], framework="pt") as opened:
            return (opened.metadata() or {}).get(CELL)
    except SafetensorError:
        return None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"no file {path}; give a folder with a config.json, as `clozelab export` writes it")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value
