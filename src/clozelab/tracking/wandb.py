"""Weights & Biases: a view of the local files, never a condition of a run.

A cell in a directory has one tracked run, whose id follows from both, so a cell that goes on continues the same run.
Arms are groups (config minus seed), the phase is the job type, the seed is a plain field. Names and tags are kept
within the service's limits before anything starts: they would otherwise fail at sync, after
the training.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clozelab.options import option
from clozelab.training.history import read_rows

log = logging.getLogger(__name__)

# Limits of the service: tags 64 characters, names and groups 128 (wandb issues #8322, #4208, #6402).
_TAG, _NAME = 64, 128
STEP = "trainer/global_step"  # the one x axis: optimiser steps, as Lightning's logger names them


@option("tracker", "none")
@dataclass
class NoTracker:
    """No tracking service; config.yaml, metrics.jsonl and record.json hold everything anyway."""

    def start(self, directory: Path, identity: dict[str, Any], config: dict[str, Any]) -> None:
        """Nothing to start."""

    def logger(self) -> None:
        """None: no logger."""

    def summary(self, metrics: dict[str, Any]) -> None:
        """Nothing to tell."""

    def finish(self, status: str) -> None:
        """Nothing to close."""


@option("tracker", "wandb")
@dataclass
class WandbTracker:
    """Weights & Biases, offline by default (`wandb sync <run directory>/wandb/offline-run-*` uploads later)."""

    project: str = "clozelab"
    """W&B project."""
    entity: str | None = None
    """W&B user or team."""
    mode: str = "offline"
    """`offline`, `online` or `disabled`."""
    tags: list[str] = field(default_factory=list)
    """Further tags; claim, arm and scale are always there."""

    def __post_init__(self) -> None:
        self._run: Any = None
        if self.mode not in ("offline", "online", "disabled"):
            raise ValueError(f"tracker.mode is {self.mode!r}; use offline, online or disabled")
        for key in ("project", "entity"):
            value = getattr(self, key)
            if value is not None and (not 1 <= len(value) <= _NAME or set(value) & set("/\\#?%:")):
                raise ValueError(f"tracker.{key} is {value!r}; W&B wants 1 to {_NAME} characters without / \\ # ? % :")
        for tag in self.tags:
            if not 1 <= len(tag) <= _TAG:
                raise ValueError(f"tracker.tags has {tag!r} of {len(tag)} characters; a W&B tag has 1 to {_TAG}")

    def start(self, directory: Path, identity: dict[str, Any], config: dict[str, Any]) -> None:
        """Open the tracked run inside `directory`; a warning, and no run, if the service cannot.

        Args:
            directory: the run directory.
            identity: cell, claim, arm, scale and seed.
            config: the resolved configuration, a plain nested dict.
        """
        self._directory = directory
        try:
            self._run = self._open(directory, identity, config)
            if self.mode == "offline":
                for row in read_rows(directory):
                    values = {key: value for key, value in row.items() if key != "step"}
                    self._run.log(values | {STEP: row["step"]})
        except Exception as error:  # a tracker's outage must never cost a run
            self._run = None
            log.warning(
                "tracker: W&B could not start (%s: %s); the run goes on without it", type(error).__name__, error
            )

    def _open(self, directory: Path, identity: dict[str, Any], config: dict[str, Any]) -> Any:
        claim, arm = identity.get("claim"), identity.get("arm")
        name = "-".join(str(identity[k]) for k in ("claim", "arm") if identity.get(k)) or "train"
        tags = [str(identity[k])[:_TAG] for k in ("claim", "arm", "scale") if identity.get(k)] + list(self.tags)
        # Of the cell and its directory: the same run when it goes on, another one when the cell is run elsewhere.
        place = hashlib.blake2b(str(directory.absolute()).encode(), digest_size=4).hexdigest()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import wandb
        # W&B's background process of whoever started this one (a notebook, a sweep that tracks something itself)
        # outlives a cell that is killed, and holds its run: the cell that goes on could not open it again.
        os.environ.pop("WANDB_SERVICE", None)
        os.environ["GIT_OPTIONAL_LOCKS"] = "0"  # W&B asks git, and a kill must not leave the user's repository locked
        if self.mode == "offline":
            # Offline, W&B cannot continue a run: it would leave two of one id. The local history makes it anew.
            for old in (directory / "wandb").glob("offline-run-*"):
                shutil.rmtree(old)
        run = wandb.init(
            project=self.project,
            entity=self.entity,
            mode=self.mode,  # type: ignore[arg-type]
            dir=str(directory),
            id=f"{identity['cell']}-{place}",
            resume="allow" if self.mode == "online" else None,
            name=f"{name}-s{identity['seed']}"[:_NAME],
            group=(f"{claim}/{identity.get('scale')}/{arm}" if claim else name)[:_NAME],
            job_type="pretrain",
            tags=tags,
            config=config,
            settings=wandb.Settings(silent=True, console="off"),
        )
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        return run

    def logger(self) -> Any:
        """Lightning's logger of the run that was opened; None if there is none."""
        if self._run is None:
            return None
        from clozelab.tracking.guarded import GuardedWandbLogger

        return GuardedWandbLogger(experiment=self._run, save_dir=str(self._directory))

    def summary(self, metrics: dict[str, Any]) -> None:
        """Put the record's metrics into the run's summary."""
        if self._run is not None:
            with contextlib.suppress(Exception):  # the record on disk already holds them
                self._run.summary.update(metrics)

    def finish(self, status: str) -> None:
        """Close the run with an exit code that matches reality: 0 only for a finished cell."""
        run, self._run = self._run, None
        if run is not None:
            try:
                run.finish(exit_code={"finished": 0, "killed": 255}.get(status, 1))
            except Exception as error:  # as above
                log.warning("tracker: W&B could not close its run (%s: %s)", type(error).__name__, error)
