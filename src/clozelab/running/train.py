"""`clozelab train`: one run, or a Hydra multirun (`-m`) whose jobs are processes of their own."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from clozelab.paths import conf_dir
from clozelab.running.compose import compose_run, composer, prepare_data, validate
from clozelab.running.directories import freeze, slug, unique_directory


def train(arguments: list[str]) -> int:
    """Run what the overrides describe. Flags (`-m`, `--help`, `--cfg job`, ...) are Hydra's own.

    Raises:
        ValueError: a configuration that cannot run; nothing was trained.
    """
    if any(argument.startswith("-") for argument in arguments):
        return _hydra(arguments)
    with composer():
        config = compose_run(arguments)
    (directory,) = prepare_runs([config])
    print(f"run directory: {directory}", file=sys.stderr)
    command = [sys.executable, "-m", "clozelab.training.cell", str(directory)]
    # The cell takes this process's place: ranks of a many-device run then replay the single-cell command.
    os.execv(sys.executable, command)


def prepare_runs(configs: list[dict[str, Any]]) -> list[Path]:
    """Validate every run, build its data, and freeze it into a new directory of its own.

    Raises:
        ValueError: one of them cannot run; nothing was trained.
    """
    for config in configs:
        validate(config)
        prepare_data(config)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    directories = []
    for config in configs:
        name = slug(f"{stamp}-{config['arm'] or 'train'}-s{config['seed']}")
        directory = unique_directory(Path(config["runs_dir"]) / "train", name)
        freeze(directory, config)
        directories.append(directory)
    return directories


def _hydra(arguments: list[str]) -> int:
    """Hand over to Hydra's own command line."""
    import hydra

    import clozelab.training.config  # noqa: F401
    from clozelab.options import discover

    discover()

    @hydra.main(config_path=str(conf_dir()), config_name="train", version_base="1.3")
    def entry(config: Any) -> None:
        from clozelab.running.compose import plain

        (directory,) = prepare_runs([plain(config)])
        print(f"run directory: {directory}", file=sys.stderr)
        os.execv(sys.executable, [sys.executable, "-m", "clozelab.training.cell", str(directory)])

    sys.argv = ["clozelab train", *arguments]
    entry()
    return 0
