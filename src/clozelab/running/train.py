"""`clozelab train`: one run, or a Hydra multirun (`-m`) whose jobs are processes of their own."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from clozelab.paths import conf_dir
from clozelab.running.compose import compose_run, composer, prepare_data, validate
from clozelab.running.directories import check_room, freeze, slug, unique_directory


def train(arguments: list[str]) -> int:
    """Run what the overrides describe; `--resume DIRECTORY` goes on with a run that was interrupted.

    Other flags (`-m`, `--help`, `--cfg job`, ...) are Hydra's own.

    Raises:
        ValueError: a configuration that cannot run; nothing was trained.
    """
    if arguments[:1] == ["--resume"]:
        if len(arguments) != 2 or not (Path(arguments[1]) / "config.yaml").is_file():
            raise ValueError("--resume wants one run directory, which holds a config.yaml, and nothing else")
        _become_cell(Path(arguments[1]))
    if any(argument.startswith("-") for argument in arguments):
        return _hydra(arguments)
    with composer():
        config = compose_run(arguments)
    (directory,) = prepare_runs([config])
    print(f"run directory: {directory}", file=sys.stderr)
    _become_cell(directory)


def _become_cell(directory: Path) -> NoReturn:
    """Let the cell take this process's place: ranks of a many-device run then replay the single-cell command."""
    os.execv(sys.executable, [sys.executable, "-m", "clozelab.running.child", str(directory)])


def prepare_runs(configs: list[dict[str, Any]]) -> list[Path]:
    """Validate every run, build its data, and freeze it into a new directory of its own.

    Raises:
        ValueError: one of them cannot run; nothing was trained.
    """
    rooms = [validate(config) for config in configs]
    prepare_data(configs)
    for config, room in zip(configs, rooms, strict=True):
        check_room(Path(config["runs_dir"]), room * len(configs), f"{len(configs)} run(s)")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    directories = []
    for config in configs:
        name = slug(f"{stamp}-{config['arm'] or 'train'}-s{config['seed']}")
        directory = unique_directory(Path(config["runs_dir"]) / "train", name)
        freeze(directory, config)
        directories.append(directory)
    return directories


def _hydra(arguments: list[str]) -> int:
    """Hand over to Hydra's own command line.

    Raises:
        ValueError: what Hydra could not compose.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    import clozelab.training.config  # noqa: F401
    from clozelab.options import discover
    from clozelab.running.compose import one_line, plain

    discover()

    @hydra.main(config_path=str(conf_dir()), config_name="train", version_base="1.3")
    def entry(config: Any) -> None:
        (directory,) = prepare_runs([plain(config)])
        print(f"run directory: {directory}", file=sys.stderr)
        if HydraConfig.get().mode == RunMode.RUN:
            _become_cell(directory)
        # Another launcher than ours: the job is still a process of its own.
        command = [sys.executable, "-m", "clozelab.running.child", str(directory), str(os.getpid())]
        code = subprocess.run(command, check=False).returncode
        if code:
            raise RuntimeError(f"{directory} ended with exit code {code}; see {directory / 'train.log'}")

    sys.argv = ["clozelab train", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach the lines below instead of Hydra's own printer
    try:
        entry()
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(one_line(error, arguments)) from error
    return 0
