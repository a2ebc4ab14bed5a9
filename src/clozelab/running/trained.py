"""What a run directory holds once it has trained up to a checkpoint."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clozelab.data.tokenizers import Tokenizer, read_tokenizer
from clozelab.running.directories import CHECKPOINT, FROZEN, read_frozen


class Trained(NamedTuple):
    """A run's configuration, its tokenizer, and the newest state of its model."""

    config: dict[str, Any]
    tokenizer: Tokenizer
    state: dict[str, Tensor]
    spent: dict[str, float]


def read_trained(run: Path) -> Trained:
    """Read a run directory; the weights are mapped, not loaded.

    Raises:
        ValueError: it is none, or has no checkpoint; names the file that is missing.
    """
    for name in (FROZEN, CHECKPOINT, "tokenizer.json"):
        if not (run / name).is_file():
            raise ValueError(f"{run} holds no {name}; give the directory of a run that has trained up to a checkpoint")
    config = read_frozen(run)
    saved = torch.load(run / CHECKPOINT, map_location="cpu", weights_only=True, mmap=True)
    prefix = "model."
    state = {name.removeprefix(prefix): value for name, value in saved["state_dict"].items() if name.startswith(prefix)}
    return Trained(config, read_tokenizer(run / "tokenizer.json"), state, dict(saved["spent"]))
