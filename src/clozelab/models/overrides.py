"""Two encoders compared as settings: what must be overridden to make one of the other.

A setting is compared in its shortest form: `kv_heads=4` with `heads=4` is `kv_heads=null`, and a gated width is the
width that is built. What acts in training alone (dropout) or before it (initial values) is no difference.
"""

import dataclasses
from typing import Any

from clozelab.models.encoder import EncoderOption
from clozelab.models.layers import GATED
from clozelab.models.positions.rope import RopeOption
from clozelab.options import registered

_TRAINING_ONLY = (
    "dropout",
    "embedding_dropout",
    "attention_dropout",
    "ffn_dropout",
    "init",
    "init_scale",
    "init_depth",
)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A setting in which two encoders differ."""

    key: str
    """As an override names it: "model.hidden", or "model/position" for the choice of a scheme."""
    ours: Any
    theirs: Any
    overrides: tuple[str, ...]
    """They make ours theirs."""

    def __str__(self) -> str:
        return f"{self.key} is {_written(self.ours)} here and {_written(self.theirs)} there"


def differences(ours: EncoderOption, theirs: EncoderOption, training: bool = False) -> list[Difference]:
    """Settings in which two encoders differ.

    Args:
        training: also what acts in training alone, and initial values.
    """
    one, other = _shortest(ours), _shortest(theirs)
    keys = [key for key in one if key != "position" and (training or key not in _TRAINING_ONLY)]
    found = []
    for key in keys:
        if one[key] != other[key]:
            overrides = [f"model.{key}={_written(other[key])}"]
            if key in ("activation", "ffn") and theirs.activation in GATED:
                overrides = [
                    f"model.activation={theirs.activation}",
                    f"model.ffn={other['ffn']}",
                    "model.gated_width=ffn",
                ]
            found.append(Difference(f"model.{key}", one[key], other[key], tuple(overrides)))
    return found + _position_differences(one["position"], other["position"])


def _position_differences(ours: Any, theirs: Any) -> list[Difference]:
    if type(ours) is type(theirs):
        return [
            Difference(f"model.position.{key}", getattr(ours, key), value, (f"model.position.{key}={_written(value)}",))
            for key, value in vars(theirs).items()
            if getattr(ours, key) != value
        ]
    names = {cls: name for name, cls in registered("model/position").items()}
    inner = _position_differences(type(theirs)(), theirs)
    overrides = (
        f"model/position={names[type(theirs)]}",
        *(text for difference in inner for text in difference.overrides),
    )
    return [Difference("model/position", names[type(ours)], names[type(theirs)], overrides)]


def _shortest(option: EncoderOption) -> dict[str, Any]:
    """The settings, with null wherever that says the same."""
    settings = dict(vars(option)) | {
        "kv_heads": None if option.key_value_heads == option.heads else option.kv_heads,
        "embedding": None if option.embedding_size == option.hidden else option.embedding,
        "output": None if option.output_width == option.embedding_size else option.output,
        "project": option.projects,
        "ffn": option.ffn_width,
        "window": None if not _locals(option) else option.window,
        "global_every": None if not _locals(option) else _period(option),
        "embedding_dropout": None if option.embedding_dropout == option.dropout else option.embedding_dropout,
    }
    del settings["gated_width"]
    position = option.position
    if isinstance(position, RopeOption) and (not _locals(option) or position.local_theta == position.theta):
        settings["position"] = dataclasses.replace(position, local_theta=None)
    return settings


def _locals(option: EncoderOption) -> list[int]:
    """Layers with local attention."""
    return [layer for layer in range(option.layers) if option.window_of(layer) is not None]


def _period(option: EncoderOption) -> int:
    """The smallest global_every that makes the same layers global."""
    same = (dataclasses.replace(option, global_every=period) for period in range(option.layers + 1))
    return next(other.global_every for other in same if _locals(other) == _locals(option))


def _written(value: Any) -> str:
    """A value as an override writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
