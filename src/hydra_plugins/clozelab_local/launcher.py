"""Hydra launcher `local_processes`: each job of a multirun is a process with a frozen config and a directory.

All jobs are composed and validated before the first starts; a job that fails never stops the others; the sweep ends
with a summary and a non-zero exit code if any failed.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class LocalProcessesConfig:
    """Settings of the launcher."""

    _target_: str = "hydra_plugins.clozelab_local.launcher.LocalProcesses"
    slots: int | None = None
    """Jobs at a time (null: one a GPU, or one a CPU core)."""


ConfigStore.instance().store(
    group="hydra/launcher", name="local_processes", node=LocalProcessesConfig, provider="clozelab"
)


class LocalProcesses(Launcher):
    """Runs the jobs of a sweep in a pool of processes.

    Args:
        slots: jobs at a time.
    """

    def __init__(self, slots: int | None = None) -> None:
        self.slots = slots
        self._context: HydraContext | None = None
        self._config: DictConfig | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what `launch` needs; the task function is not called, its configuration is."""
        self._context, self._config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose, validate and run every job."""
        from clozelab.running.compose import one_line, plain
        from clozelab.running.job import CellFailed, Job
        from clozelab.running.sweep import launcher_of, run_sweep
        from clozelab.running.train import objective_of, prepare_runs

        assert self._context is not None
        assert self._config is not None
        configs: list[dict[str, Any]] = []
        try:
            for overrides in job_overrides:
                if any(str(o).partition("=")[0].startswith("hydra/launcher") for o in overrides):
                    raise ValueError("hydra/launcher cannot be swept: a sweep has one launcher")
                composed = self._context.config_loader.load_sweep_config(self._config, list(overrides))
                configs.append(plain(composed))
            node = configs[0]["launcher"] | ({"slots": self.slots} if self.slots is not None else {})
            if any(config["launcher"] != configs[0]["launcher"] for config in configs):
                raise ValueError("launcher cannot be swept: a sweep has one launcher")
            devices = max(config["trainer"]["devices"] for config in configs)
            launcher = launcher_of(node, devices)
            for config in configs:
                config["trainer"]["threads"] = config["trainer"]["threads"] or launcher.threads(devices)
            directories = prepare_runs(configs)
        except ValueError as error:
            print(f"clozelab: {' '.join(str(error).split())}", file=sys.stderr)
            sys.exit(2)
        except Exception as error:
            print(f"clozelab: {one_line(error, [])}", file=sys.stderr)
            sys.exit(2)
        # Sweepers of others write their results there, and count on the launcher for the folder.
        Path(str(self._config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        common = set.intersection(*(set(overrides) for overrides in job_overrides)) if len(job_overrides) > 1 else set()
        names = [" ".join(o for o in overrides if o not in common) or "run" for overrides in job_overrides]
        jobs = [Job(name=name, directory=directory) for name, directory in zip(names, directories, strict=True)]
        outcomes = {outcome.job.directory: outcome for outcome in run_sweep(jobs, launcher, devices)}
        returns = []
        for overrides, config, directory in zip(job_overrides, configs, directories, strict=True):
            outcome = outcomes.get(directory)
            done = outcome is not None and not outcome.failed
            value: object = CellFailed("not run" if outcome is None else outcome.reason)
            if done:
                try:
                    value = objective_of(directory, config["objective"])
                except ValueError as error:  # a metric that some runs have, and not this one
                    done, value = False, CellFailed(str(error))
            result = JobReturn(
                overrides=list(overrides),
                cfg=config,  # type: ignore[arg-type]
                working_dir=str(Path.cwd()),
                status=JobStatus.COMPLETED if done else JobStatus.FAILED,
            )
            result.return_value = value
            returns.append(result)
        if any(result.status == JobStatus.FAILED for result in returns) and configs[0]["objective"] is None:
            sys.exit(1)  # a sweeper that optimises is told of failures instead
        return returns
