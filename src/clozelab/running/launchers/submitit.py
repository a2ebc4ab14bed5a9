"""Slurm through submitit: each cell a job of its own. `cluster=local` runs the same without a cluster.

A cell that Slurm takes away (pre-emption, a node that fails, `scontrol requeue`) is put into the queue again by Slurm
or by submitit, and goes on from its checkpoint. The record decides how a cell ended. Whether a job is still queued is
asked of `squeue`, which needs no accounting; submitit asks `sacct`, and without it would wait for a lost job for ever.
"""

import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clozelab.machine import cores
from clozelab.options import option
from clozelab.running.job import Job, Limits, Outcome, outcome_of_lost
from clozelab.running.launcher import LauncherOption, check_gpus
from clozelab.running.launchers.waiting import wait_for_all
from clozelab.running.pool import Follow
from clozelab.running.supervise import environment_of, supervise

CLUSTERS = ("slurm", "local")
# How long a job whose cell was told to end waits for Slurm to end it: more than KillWait and most grace times.
_TAKEN_AWAY_SECONDS = 300.0
_QUEUE_SECONDS = 5.0
# A job that has left the queue may have written its result on a file system that has not shown it yet.
_LOST_SECONDS = 20.0
_TOLD_TO_END = (128 + signal.SIGTERM, -signal.SIGTERM)


@dataclass
class Supervised:
    """What a job of submitit does: called again after a requeue, it goes on with the cell."""

    job: Job
    limits: Limits
    threads: int

    def __call__(self) -> Outcome:
        """Run the cell to its end; a record that is there already is not made again."""
        outcome = supervise(self.job, self.limits, environment_of(self.threads))
        if not outcome.done and outcome.code in _TOLD_TO_END and "SLURM_JOB_ID" in os.environ:
            # Slurm's SIGTERM reaches every process of a job, and the cell, which kept its state, is the first to end.
            # To return now would say that it failed, where Slurm is about to end this job and start it again.
            time.sleep(_TAKEN_AWAY_SECONDS)
        return outcome

    def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Before Slurm takes the job away: the same once more (the cell itself has kept its state)."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


@option("launcher", "submitit")
@dataclass
class SubmititLauncher(LauncherOption):
    """Cells as jobs of a cluster."""

    cluster: str = "slurm"
    """slurm, or local (processes of this machine, for trying it out)."""
    partition: str | None = None
    """Slurm partition."""
    cpus: int = 1
    """CPU cores of a job; its cell gets as many threads."""
    gpus: int = 0
    """GPUs of a job; 0: none is asked for, and ranks of a cell (`trainer.devices`) share its CPU cores."""
    job_minutes: int = 24 * 60
    """Time limit of a Slurm job. `timeout` should be shorter, so that the cell's own limit is met first."""
    job_gb: float | None = None
    """Memory of a Slurm job in GiB; null: the partition's default."""
    requeues: int = 10
    """How often submitit puts a job that ran out of time into the queue again."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further parameters of `submitit.AutoExecutor.update_parameters`, for example {slurm_account: mine}."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cluster not in CLUSTERS:
            raise ValueError(f"launcher.cluster is {self.cluster!r}; give one of {', '.join(CLUSTERS)}")
        for key, least in (("cpus", 1), ("job_minutes", 1), ("gpus", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"launcher.{key} is {getattr(self, key)}; it must be at least {least}")

    def check(self, devices: int) -> None:
        check_gpus(self.gpus, devices)
        try:
            import submitit
        except ImportError:
            raise ValueError("launcher=submitit needs submitit: pip install 'clozelab[slurm]'") from None
        if self.cluster == "slurm" and submitit.SlurmExecutor.affinity() < 0:
            raise ValueError(
                "launcher=submitit finds no Slurm here (no srun on the path); run this on a login node, or try it out "
                "with launcher.cluster=local"
            )

        with tempfile.TemporaryDirectory() as folder:  # it is made with the executor
            self._executor(Path(folder))

    def _executor(self, folder: Path) -> Any:
        """What submits jobs, set up.

        Raises:
            ValueError: a parameter in `extra` that submitit does not know, or a value that it does not take.
        """
        import submitit

        executor = submitit.AutoExecutor(folder=folder, cluster=self.cluster, slurm_max_num_timeout=self.requeues)
        parameters: dict[str, Any] = {
            "timeout_min": self.job_minutes,
            "cpus_per_task": self.cpus,
            "name": "clozelab",
            # From Slurm 22.05 on srun does not take the cores over from sbatch, and would bind the cell to one of them.
            "slurm_srun_args": [f"--cpus-per-task={self.cpus}"],
            # Where the cluster's own default (JobRequeue) is not to.
            "slurm_additional_parameters": {"requeue": True},
        }
        if self.partition is not None:
            parameters["slurm_partition"] = self.partition
        if self.job_gb is not None:
            parameters["mem_gb"] = self.job_gb
        if self.gpus:
            parameters["gpus_per_node"] = self.gpus
        try:
            executor.update_parameters(**parameters | self.extra)
        except (NameError, AssertionError, TypeError, ValueError) as error:
            said = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"launcher.extra: submitit does not take it: {said}") from error
        return executor

    def threads(self, devices: int) -> int:
        return self.cpus if self.cluster == "slurm" else max(1, min(self.cpus, cores()))

    def launch(self, jobs: list[Job], devices: int, follow: Follow) -> list[Outcome]:
        import submitit

        # A folder of this launch alone: a job's number may have been that of another once.
        folder = _common(jobs) / "submitit" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        executor = self._executor(folder)
        tasks = {job.directory: Supervised(job.absolute, self.limits, self.threads(devices)) for job in jobs}
        handles: dict[Path, Any] = {}
        ends: dict[Path, Outcome] = {}
        queue = Queue()
        if self.cluster == "slurm":
            try:
                with executor.batch():
                    handles |= {directory: executor.submit(task) for directory, task in tasks.items()}
            except submitit.core.utils.FailedJobError as error:
                raise ValueError(f"Slurm takes no job: {' '.join(str(error).split())}") from error

        def ended(job: Job) -> Outcome | None:
            handle = handles.get(job.directory)
            if handle is None:  # no queue here but this one: as many at a time as there are cores
                if len(handles) - len(ends) < max(1, cores() // self.cpus):
                    handles[job.directory] = executor.submit(tasks[job.directory])
                return None
            if self.cluster == "slurm" and not handle.paths.result_pickle.exists():
                if not queue.has_lost(handle.job_id):
                    return None
                lost = f"Slurm has ended its job {handle.job_id}, which left no result; see {handle.paths.stderr}"
                ends[job.directory] = outcome_of_lost(job, lost)
                return ends[job.directory]
            if not handle.done():
                return None
            ends[job.directory] = _outcome(job, handle)
            return ends[job.directory]

        def cancel(job: Job) -> None:
            if job.directory in handles:
                handles[job.directory].cancel(check=False)

        return wait_for_all(jobs, ended, follow, self.fail_fast, cancel)


class Queue:
    """What Slurm's queue holds of this user, asked every few seconds at most, and for all jobs at once."""

    def __init__(self) -> None:
        self._held: set[str] | None = None
        self._asked = float("-inf")
        self._missed: dict[str, float] = {}

    def has_lost(self, job_id: str) -> bool:
        """Whether a job has been out of the queue for so long that nothing can come of it."""
        now = time.monotonic()
        if now - self._asked >= _QUEUE_SECONDS:
            self._asked = now
            command = ["squeue", "--noheader", "--me", "--array", "--format=%i"]
            try:
                answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
                self._held = set(answer.stdout.split())
            except (OSError, subprocess.SubprocessError):
                self._held = None  # a controller that is away says nothing about jobs
        if self._held is None or job_id in self._held:
            self._missed.pop(job_id, None)
            return False
        return now - self._missed.setdefault(job_id, now) > _LOST_SECONDS


def _outcome(job: Job, handle: Any) -> Outcome:
    """What a job that has ended returned, or, where its own process was lost, what the cell's directory knows."""
    try:
        outcome: Outcome = handle.result()
        return outcome
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        return outcome_of_lost(job, f"its job {handle.job_id} was lost ({handle.state}): {said}")


def _common(jobs: list[Job]) -> Path:
    """The folder that holds the jobs' directories."""
    return jobs[0].directory.absolute().parent
