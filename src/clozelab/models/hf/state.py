"""State dicts of Hugging Face from ours, and ours from theirs, by the maps.

Three kinds of names of theirs have no parameter of ours behind them: copies of a tied one, heads and buffers that are
of no use here, and what their class cannot do without although our option does (`fillers`), in whose place stands what
changes nothing.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from clozelab.models.encoder import EncoderOption
from clozelab.models.hf.config import POSITIONS, check, family_of
from clozelab.models.hf.maps import BUFFERS, FAMILIES, OLD_LEAVES, Family
from clozelab.models.positions.sinusoidal import Sinusoidal, SinusoidalOption


def theirs_of(name: str, option: EncoderOption, family: Family) -> tuple[str, ...]:
    """The parameters of theirs of which ours is made, one after another; none: their class has nothing like it."""
    number = re.search(r"\.blocks\.(\d+)\.", name)
    pattern = re.sub(r"\.blocks\.\d+\.", ".blocks.*.", name)
    module, _, leaf = pattern.rpartition(".")
    if pattern in family.names:
        found, ending = family.names[pattern], ""
    elif module in family.names:
        found, ending = family.names[module], f".{leaf}"
    else:
        return ()
    block = 0 if number is None else int(number[1])
    return tuple(_numbered(one, block, option) + ending for one in ((found,) if isinstance(found, str) else found))


def _numbered(name: str, block: int, option: EncoderOption) -> str:
    numbers = divmod(block, option.share_inner) if name.count("*") == 2 else (block,)
    for number in numbers:
        name = name.replace("*", str(number), 1)
    return name


def made_of(
    state: Mapping[str, Tensor], wanted: Iterable[str], option: EncoderOption, family: Family
) -> dict[str, Tensor]:
    """Those parameters of ours of which all parts are in a state of theirs."""
    parts = {name: theirs_of(name, option, family) for name in wanted}
    return {
        name: torch.cat([state[part] for part in theirs])
        for name, theirs in parts.items()
        if theirs and all(part in state for part in theirs)
    }


class Filler(NamedTuple):
    """What changes nothing in a parameter of theirs that ours does without."""

    value: Callable[[int], Tensor]
    """With as many rows as asked for; 0: as many as their class has by `hf_config`."""
    error: float = 0.0
    """What may differ from it and still be rounding."""


def from_hf_state(
    state: Mapping[str, Tensor], option: EncoderOption, pair: bool = False, mlm: bool = True, replaced: bool = False
) -> dict[str, Tensor]:
    """The state dict of our `PretrainingModel`, made of that of a masked-language-model or pre-training class of any of
    the six families. The names in it tell which family it is; a family that the option could also be written as is
    no obstacle (an ELECTRA as wide as its embedding is a BERT).

    Args:
        state: theirs; buffers, tied copies and other heads may be present or absent.
        option: describes the same model (`option_of` makes it).
        pair: include the pair head.
        mlm: include the masked-language-model head.
        replaced: include the head of replaced tokens.

    Raises:
        ValueError: a setting that the family cannot have; or all names that the option calls for and the state lacks,
            all that it has and the option has no place for, and all whose shapes differ.
    """
    family = _family_of_state(state, option)
    check(option, family)
    state = {re.sub(r"[^.]+$", lambda leaf: OLD_LEAVES.get(leaf[0], leaf[0]), name): v for name, v in state.items()}
    token = theirs_of("encoder.embeddings.token.weight", option, family)[0]
    copies = _copies(option, family)
    differing = [
        f"{copy} (unlike {original})"
        for copy, original in copies.items()
        if option.tie_output and {copy, original} <= state.keys() and not torch.equal(state[copy], state[original])
    ]
    for copy, original in copies.items():
        # Untied, their class uses the output layer's own.
        if copy in state and (original not in state or not option.tie_output):
            state[original] = state[copy]
    if option.tie_output and token in state:
        state[theirs_of("mlm.weight", option, family)[0]] = state[token]

    model = _skeleton(option, len(state[token]) if token in state else 1, pair, mlm, replaced)
    result = made_of(state, model, option, family)
    used = {part for name in model for part in theirs_of(name, option, family)} | copies.keys()
    for name, filler in fillers(option, family).items():
        if name in state and _is(state[name], filler):
            used.add(name)
    missing = [
        f"{name} ({', '.join(theirs_of(name, option, family)) or 'no counterpart'})" for name in model.keys() - result
    ]
    unexpected = [
        name for name in state if name not in used and not name.startswith(family.unused) and not name.endswith(BUFFERS)
    ]
    shapes = [
        f"{name} {list(value.shape)} (not {list(model[name].shape)})"
        for name, value in result.items()
        if token in state and value.shape != model[name].shape
    ]
    problems = {"missing": missing, "unexpected": unexpected + differing, "of another shape": shapes}
    if any(problems.values()):
        found = "; ".join(f"{problem}: {', '.join(sorted(names))}" for problem, names in problems.items() if names)
        raise ValueError(f"the {family.model_type} state does not fit the model: {found}")
    return {name: result[name] for name in model}


def to_hf_state(state: Mapping[str, Tensor], option: EncoderOption, model_type: str | None = None) -> dict[str, Tensor]:
    """The state dict of a Hugging Face model, made of that of our `PretrainingModel`.

    The tied decoder is left out, as Hugging Face's own files do. What ours lacks and theirs cannot do without is filled
    in so that it changes nothing: a row of segments, a projection of an embedding as wide as the hidden state, a table
    of sinusoids.

    Args:
        state: ours, with all heads, some or none.
        option: of our model.
        model_type: the family whose names are wanted; None: `family_of(option)`.

    Raises:
        ValueError: the family cannot hold this encoder.
    """
    family = FAMILIES[family_of(option) if model_type is None else model_type]
    check(option, family)
    result: dict[str, Tensor] = {}
    for name, value in state.items():
        if name == "mlm.weight" and option.tie_output:
            continue
        theirs = theirs_of(name, option, family)
        if not theirs:
            raise ValueError(f"{name} has no counterpart in Hugging Face's {family.model_type}")
        for part, piece in zip(theirs, value.chunk(len(theirs)), strict=True):
            result[part] = piece.clone()
    if not option.tie_output:
        # Untied, their class uses the output layer's own bias.
        result |= {copy: result[original].clone() for copy, original in family.copies.items() if original in result}
    token = state["encoder.embeddings.token.weight"]
    return result | {name: filler.value(0).to(token) for name, filler in fillers(option, family).items()}


def fillers(option: EncoderOption, family: Family) -> dict[str, Filler]:
    """Parameters of theirs that our option does without."""
    result: dict[str, Filler] = {}
    width = option.embedding_size
    if not option.segments and "encoder.embeddings.segment" in family.names:
        (segment,) = theirs_of("encoder.embeddings.segment.weight", option, family)
        result[segment] = Filler(lambda rows: torch.zeros(rows or 1, width))
    if family.model_type == "albert" and not option.projects:
        (weight,) = theirs_of("encoder.embeddings.project.weight", option, family)
        (bias,) = theirs_of("encoder.embeddings.project.bias", option, family)
        result |= {weight: Filler(lambda rows: torch.eye(width)), bias: Filler(lambda rows: torch.zeros(width))}
    if isinstance(option.position, SinusoidalOption):
        table = Sinusoidal(width, option.position.base)
        (position,) = theirs_of("encoder.embeddings.position.weight", option, family)
        # An angle of some hundreds has lost this much in float32.
        result[position] = Filler(lambda rows: table.embed(torch.arange(rows or POSITIONS)), 1e-3)
    return result


def _is(value: Tensor, filler: Filler) -> bool:
    neutral = filler.value(len(value)).to(value)
    return value.shape == neutral.shape and torch.allclose(value, neutral, rtol=0.0, atol=filler.error)


def _copies(option: EncoderOption, family: Family) -> dict[str, str]:
    """Further names of a parameter of theirs -> its own."""
    copies = dict(family.copies)
    if option.tie_output:
        (output,) = theirs_of("mlm.weight", option, family)
        (copies[output],) = theirs_of("encoder.embeddings.token.weight", option, family)
    return copies


def _family_of_state(state: Mapping[str, Tensor], option: EncoderOption) -> Family:
    for family in FAMILIES.values():
        if f"{family.names['encoder.embeddings.token']}.weight" in state:
            return family
    return FAMILIES[family_of(option)]


def _skeleton(option: EncoderOption, vocab_size: int, pair: bool, mlm: bool, replaced: bool) -> dict[str, Tensor]:
    from clozelab.models.pretraining import PretrainingModel

    with torch.device("meta"):
        # With a head at least, whether or not it is asked for.
        model = PretrainingModel(option, vocab_size, 0, mlm=mlm, pair=True, replaced=replaced)
        return {name: value for name, value in model.state_dict().items() if pair or not name.startswith("pair.")}
