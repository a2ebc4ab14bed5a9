"""`clozelab train`: one run, or a Hydra multirun (`-m`) whose jobs are processes of their own."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from clozelab.options import build
from clozelab.paths import conf_dir
from clozelab.running.compose import compose_run, composer, prepare_data, validate
from clozelab.running.directories import check_room, freeze, slug, unique_directory
from clozelab.running.job import RECORD, CellFailed, Job
from clozelab.running.outcomes import note, noted
from clozelab.running.supervise import environment_of, supervise
from clozelab.running.sweep import sum_up


def train(arguments: list[str]) -> int:
    """Run what the overrides describe; `--resume DIRECTORY [auto|must|never]` goes on with a run that was interrupted.

    auto (as it stands there, from its checkpoint if it has one), must (from its checkpoint, or not at all), never (from
    the start; the checkpoint is put aside). Other flags (`-m`, `--help`, `--cfg job`, ...) are Hydra's own.

    Raises:
        ValueError: a configuration that cannot run; nothing was trained.
    """
    if arguments[:1] == ["--resume"]:
        if len(arguments) not in (2, 3) or not (Path(arguments[1]) / "config.yaml").is_file():
            raise ValueError(
                "--resume wants one run directory, which holds a config.yaml, and if need be auto, must or never"
            )
        _become_cell(Path(arguments[1]), *arguments[2:])
    if any(argument.startswith("-") for argument in arguments):
        return _hydra(arguments)
    with composer():
        config = compose_run(arguments)
    (directory,) = prepare_runs([config])
    print(f"run directory: {directory}", file=sys.stderr)
    _become_cell(directory)


def _become_cell(directory: Path, resume: str = "auto") -> NoReturn:
    """Let the cell take this process's place: ranks of a many-device run then replay the single-cell command."""
    os.execv(sys.executable, [sys.executable, "-m", "clozelab.running.child", str(directory), "0", resume])


def prepare_runs(configs: list[dict[str, Any]]) -> list[Path]:
    """Validate every run, build its data, and freeze it into a new directory of its own.

    Raises:
        ValueError: one of them cannot run; nothing was trained.
    """
    for config in configs:
        check_objective(config)
    rooms = [validate(config) for config in configs]
    prepare_data(configs)
    for config, room in zip(configs, rooms, strict=True):
        check_room(Path(config["runs_dir"]), room * len(configs), f"{len(configs)} run(s)")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    directories = []
    for config in configs:
        name = slug(f"{stamp}-{config['arm'] or 'train'}-s{config['seed']}")
        directory = unique_directory(Path(config["runs_dir"]) / "train", name)
        freeze(directory, {key: value for key, value in config.items() if key not in ("launcher", "objective")})
        directories.append(directory)
    return directories


def check_objective(config: dict[str, Any]) -> None:
    """Refuse a metric to optimise that no yardstick of the run gives.

    Raises:
        ValueError: names those that there will be.
    """
    metric, yardsticks = config["objective"], [build(node) for node in config["evaluation"].values()]
    gives = [name for yardstick in yardsticks for name in yardstick.gives]
    if metric is not None and metric not in gives and all(yardstick.gives for yardstick in yardsticks):
        raise ValueError(f"objective={metric} is no metric of this run; it will have {', '.join(gives) or 'none'}")


def objective_of(directory: Path, metric: str | None) -> float | str:
    """What a sweeper is told of a run: its metric, or where none is asked for, its directory.

    Raises:
        ValueError: the run has no such metric; names those it has.
    """
    if metric is None:
        return str(directory)
    found = json.loads((directory / RECORD).read_text())["metrics"]
    if metric not in found:
        raise ValueError(f"objective={metric} is no metric of this run; it has {', '.join(sorted(found))}")
    return float(found[metric]["value"])


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
    def entry(config: Any) -> float | str:
        run = plain(config)
        (directory,) = prepare_runs([run])
        print(f"run directory: {directory}", file=sys.stderr)
        if HydraConfig.get().mode == RunMode.RUN:
            _become_cell(directory)
        # Another launcher than ours: the job is still a process of its own, under the same supervision.
        launcher = build(run["launcher"])
        outcome = supervise(
            Job(" ".join(HydraConfig.get().overrides.task) or "run", directory),
            launcher.limits,
            environment_of(launcher.threads(run["trainer"]["devices"])),
        )
        note(Path(HydraConfig.get().sweep.dir), outcome)
        if outcome.failed:
            raise CellFailed(f"{outcome.job.name}: {outcome.reason}; see {directory / 'train.log'}")
        return objective_of(directory, run["objective"])

    sys.argv = ["clozelab train", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach the lines below instead of Hydra's own printer
    try:
        entry()
    except CellFailed:  # Hydra's word on the first one; all of them are named below
        return 1
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(one_line(error, arguments)) from error
    finally:
        outcomes = noted()
        sum_up(outcomes, len(outcomes), Console(stderr=True, soft_wrap=True))
    return 0
