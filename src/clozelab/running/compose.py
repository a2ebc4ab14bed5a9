"""Compose configurations with Hydra, and check them before anything is trained."""

import difflib
import functools
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from clozelab.claims.guard import flatten
from clozelab.options import build, discover, registered
from clozelab.paths import conf_dir


@contextmanager
def composer() -> Iterator[None]:
    """A context in which `compose_run` works; options are discovered once."""
    import clozelab.training.config  # noqa: F401  (registers the root schema)

    discover()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield


def compose_run(overrides: list[str]) -> dict[str, Any]:
    """The resolved configuration of one run as a plain nested dict.

    Raises:
        ValueError: an unknown group, option or key, or a value of the wrong type; one line that names it.
    """
    try:
        return plain(compose("train", overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(one_line(error, overrides)) from error


def _nearest(problem: str) -> str:
    """For an override of a key that does not exist: the key that may have been meant."""
    if not (match := re.match(r"Could not override '([^']+)'", problem)):
        return ""
    # Hydra's own command line has taken its Hydra away by the time its errors come here.
    with nullcontext() if GlobalHydra.instance().is_initialized() else composer():
        known = flatten(plain(compose("train")))
    if match[1] == "masking/selection":
        return "; only masked text has a selection: choose masking=dynamic, or another that hides tokens"
    if match[1] in known:
        return "; the option that has this key was not chosen"
    near = difflib.get_close_matches(match[1], known, n=1)
    return f"; there is no such key{f', did you mean {near[0]}?' if near else ''}"


def one_line(error: BaseException, overrides: list[str]) -> str:
    """What Hydra or OmegaConf said, on one line, with the override it was about and the way out."""
    text = str(error.__cause__ if error.__cause__ is not None and "merging override" in str(error) else error)
    head = [line.strip() for line in text.splitlines() if line.strip()]
    kept = []
    for line in head:
        if line.startswith(
            ("Config search path", "provider=", "full_key", "object_type", "reference_type", "To append")
        ):
            if line.startswith("full_key"):
                kept.append(f"(key {line.partition(':')[2].strip()})")
            if not line.startswith("full_key"):
                break
            continue
        kept.append(line)
    where = f"[overrides: {' '.join(overrides) or 'none'}; `clozelab train --help` lists the options]"
    return f"{' '.join(kept)} {where}{_nearest(text)}"


def plain(config: DictConfig) -> dict[str, Any]:
    """A composed config as plain containers, fully resolved: it loads without Hydra years later."""
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    container = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def validate(config: dict[str, Any]) -> int:
    """Build every option and the model on the meta device.

    Returns:
        bytes that the run's directory will about need: two checkpoints (one is written beside the other) and logs.

    Raises:
        ValueError: a setting is impossible, alone or together with another.
    """
    import torch

    from clozelab.data.phases import schedule_of
    from clozelab.running.start import check_encoder, start_folder, start_state

    options = {key: build(node) for key, node in config.items() if isinstance(node, dict) and "_target_" in node}
    model, format_ = options["model"], options["format"]
    task, masking = options["task"], options["masking"]
    task.check(masking)
    tells = task.tells(masking)
    if task.has_pair and not format_.style.segments:
        raise ValueError(
            f"task.pair={task.pair} needs sequences of two segments, and this format has one; choose "
            "format=segment_pair or sentence_pair, or task.pair=none"
        )
    for name, node in config["evaluation"].items():
        _check_yardstick(name, build(node), tells, format_)
    if masking.targets(format_.max_length) < 1:
        raise ValueError(
            f"masking.rate is {masking.rate}: no sequence of format.max_length={format_.max_length} would get a "
            "target; give more"
        )
    longest = model.position.longest
    length = max(length for _, length in schedule_of(config.get("lengths"), format_.max_length))
    if longest is not None and length > longest:
        key = "format.max_length" if config.get("lengths") is None else "the longest of lengths"
        raise ValueError(
            f"{key} is {length} but model.position.length is {longest}; "
            "shorten the sequences or enlarge the position table"
        )
    if config["batch_size"] < 1:
        raise ValueError(f"batch_size is {config['batch_size']}; it must be at least 1")
    trainer = options["trainer"]
    batch_tokens = config.get("batch_tokens")
    if batch_tokens is not None and batch_tokens < format_.max_length:
        raise ValueError(
            f"batch_tokens is {batch_tokens}, less than one sequence of format.max_length={format_.max_length}; "
            "give more, or null to go by batch_size"
        )
    if batch_tokens is None and config["batch_size"] % (trainer.accumulate * trainer.devices):
        raise ValueError(
            f"batch_size {config['batch_size']} does not divide into trainer.accumulate={trainer.accumulate} "
            f"micro-batches on trainer.devices={trainer.devices}; choose a multiple of "
            f"{trainer.accumulate * trainer.devices}"
        )
    vocab_size = getattr(options["tokenizer"], "vocab_size", 30522)
    if (folder := start_folder(config)) is not None:
        vocab_size = check_encoder(folder, model).vocab_size
    with torch.device("meta"):
        built = task.build(model, vocab_size, 0, masking.causal)
    if folder is not None:
        start_state(folder, built)
    weights_and_moments: int = 3 * 4 * sum(parameter.numel() for parameter in built.parameters())
    return 2 * weights_and_moments + 10_000_000


_TOLD = {"hidden": "hidden tokens", "next": "the next token", "replaced": "which tokens were replaced"}


def _check_yardstick(name: str, yardstick: Any, tells: str, format_: Any) -> None:
    """Raise ValueError where a yardstick cannot measure what the run will train."""
    if tells not in yardstick.tells:
        fit = ",".join(name for name, cls in registered("evaluation").items() if tells in getattr(cls, "tells", ()))
        raise ValueError(
            f"evaluation.{name} measures models that tell {' or '.join(_TOLD[one] for one in yardstick.tells)}, and "
            f"this one tells {_TOLD[tells]}; choose evaluation=[{fit}], or some of these"
        )
    try:
        seen = yardstick.sees(format_)
    except ValueError as error:
        raise ValueError(f"evaluation.{name}.format: {error}") from None
    if not seen.style.segments and any(pair != "none" for _, pair in yardstick.needs()):
        raise ValueError(
            f"evaluation.{name} needs sequences of two segments, and this format has one; do without it "
            f"(evaluation=[...]), or let it see them in another: evaluation.{name}.format=segment_pair"
        )


def prepare_data(configs: Iterable[dict[str, Any]]) -> None:
    """Build (or find) the stores, and cut the splits into examples: every data error shows before the first cell.

    What configurations share is opened and cut once.

    Raises:
        ValueError: the corpus is missing, empty, too small for the task, or its tokenizer lacks a mask token, or is not
            that of the weights a run starts from.
    """
    from clozelab.data.example_cache import examples_of
    from clozelab.data.examples import Examples
    from clozelab.data.format import FormatOption
    from clozelab.data.pairs import pair_objective
    from clozelab.data.phases import formats_of
    from clozelab.data.store import Store, cache_dir, open_store
    from clozelab.running.start import check_vocabulary

    @functools.cache
    def opened(source: str) -> Store:
        corpus, tokenizer = json.loads(source)
        return open_store(build(corpus), build(tokenizer), cache_dir())

    cuts: dict[tuple[str, str, str], Examples] = {}

    def cut(source: str, format_: FormatOption, split: str) -> Examples:
        key = (source, repr(format_), split)
        if key not in cuts:
            cuts[key] = examples_of(opened(source), format_, split)
        return cuts[key]

    for config in configs:
        source = json.dumps([config["corpus"], config["tokenizer"]], sort_keys=True)
        formats = [format_ for _, format_ in formats_of(config, build(config["format"]))]
        check_vocabulary(config)  # before a whole corpus is made into ids of another vocabulary
        opened(source)  # here, so that no single need is blamed for a corpus that cannot be read
        task, masking = build(config["task"]), build(config["masking"])
        masking.check(opened(source).tokenizer)
        # Training passes through every length of a schedule; yardsticks have the last.
        needs = [(f"task.pair={task.pair}", "train", task.pair, format_) for format_ in formats]
        for name, node in config["evaluation"].items():
            yardstick = build(node)
            seen = yardstick.sees(formats[-1])
            needs += [(f"evaluation.{name}", split, pair, seen) for split, pair in yardstick.needs()]
        for who, split, pair, format_ in needs:
            try:
                pair_objective(pair).check(cut(source, format_, split))
            except ValueError as error:
                raise ValueError(f"{who}: {error}") from None
