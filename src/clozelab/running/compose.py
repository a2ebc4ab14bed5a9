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
from clozelab.options import build, discover
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
    from clozelab.models.pretraining import PretrainingModel
    from clozelab.running.start import check_encoder, start_folder, start_state

    options = {key: build(node) for key, node in config.items() if isinstance(node, dict) and "_target_" in node}
    for node in config["evaluation"].values():
        build(node)
    model, format_ = options["model"], options["format"]
    causal = options["masking"].causal
    if causal and options["task"].pair != "none":
        raise ValueError(
            f"task.pair={options['task'].pair} is told from the first position, which under masking=causal has seen "
            "nothing; choose task.pair=none"
        )
    needs = {f"task.pair={options['task'].pair}": options["task"].pair}
    for name, node in config["evaluation"].items():
        yardstick = build(node)
        needs |= {f"evaluation.{name}": pair for _, pair in yardstick.needs()}
        if yardstick.causal != causal:
            reads = "from left to right" if yardstick.causal else "both ways"
            raise ValueError(
                f"evaluation.{name} measures models that read {reads}; choose "
                f"evaluation={'[heldout_clm]' if causal else '[heldout_mlm,sentence_pairs]'}"
            )
    for who, pair in needs.items():
        if pair != "none" and not format_.style.segments:
            raise ValueError(
                f"{who} needs sequences of two segments, and this format has one; choose format=segment_pair or "
                "sentence_pair, or do without it (task.pair=none, evaluation=[heldout_mlm])"
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
        built = PretrainingModel(model, vocab_size, 0, pair=options["task"].pair != "none")
    if folder is not None:
        start_state(folder, built)
    weights_and_moments = 3 * 4 * sum(parameter.numel() for parameter in built.parameters())
    return 2 * weights_and_moments + 10_000_000


def prepare_data(configs: Iterable[dict[str, Any]]) -> None:
    """Build (or find) the stores, and cut the splits into examples: every data error shows before the first cell.

    What configurations share is opened and cut once.

    Raises:
        ValueError: the corpus is missing, empty, too small for the task, or its tokenizer lacks a mask token, or is not
            that of the weights a run starts from.
    """
    from clozelab.data.examples import Examples
    from clozelab.data.pairs import pair_objective
    from clozelab.data.phases import schedule_of
    from clozelab.data.store import Store, cache_dir, open_store
    from clozelab.running.start import check_vocabulary

    @functools.cache
    def opened(source: str) -> Store:
        corpus, tokenizer = json.loads(source)
        return open_store(build(corpus), build(tokenizer), cache_dir())

    @functools.cache
    def cut(source: str, format_: str, split: str) -> Examples:
        made = build(json.loads(format_)).examples(opened(source), split)
        assert isinstance(made, Examples)
        return made

    for config in configs:
        source = json.dumps([config["corpus"], config["tokenizer"]], sort_keys=True)
        schedule = schedule_of(config.get("lengths"), config["format"]["max_length"])
        formats = [json.dumps(config["format"] | {"max_length": length}, sort_keys=True) for _, length in schedule]
        check_vocabulary(config)  # before a whole corpus is made into ids of another vocabulary
        opened(source)  # here, so that no single need is blamed for a corpus that cannot be read
        task, masking = build(config["task"]), build(config["masking"])
        masking.check(opened(source).tokenizer)
        needs = {("train", task.pair): f"task.pair={task.pair}"}
        for name, node in config["evaluation"].items():
            needs |= {need: f"evaluation.{name}" for need in build(node).needs() if need not in needs}
        for (split, pair), who in needs.items():
            try:
                # Training passes through every length of a schedule; yardsticks have the last.
                for format_ in formats if split == "train" else formats[-1:]:
                    pair_objective(pair).check(cut(source, format_, split))
            except ValueError as error:
                raise ValueError(f"{who}: {error}") from None
