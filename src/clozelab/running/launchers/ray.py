"""Ray: each cell a task, on this machine or on a running cluster that shares the file system.

A worker that dies takes its cell with it; Ray calls the task again elsewhere, and the cell goes on from its checkpoint.
"""

import contextlib
import os
import signal
import threading
from dataclasses import dataclass
from typing import Any

from clozelab.machine import cores
from clozelab.options import option
from clozelab.running.job import Job, Limits, Outcome, outcome_of_lost
from clozelab.running.launcher import LauncherOption, check_gpus
from clozelab.running.launchers.waiting import wait_for_all
from clozelab.running.pool import Follow
from clozelab.running.supervise import environment_of, supervise

# Settings of ours and of the libraries that cells use; a worker of a running cluster has those of its own start.
_OWN = ("CLOZELAB_", "WANDB_", "HF_", "NCCL_", "TORCH_NCCL_", "GLOO_", "PYTHONPATH")


@option("launcher", "ray")
@dataclass
class RayLauncher(LauncherOption):
    """Cells as tasks of Ray."""

    address: str | None = None
    """Of a running cluster ("auto": the one of this machine); null: one is started here, and ended again."""
    cpus: int = 1
    """CPU cores that a cell takes; it gets as many threads."""
    gpus: float = 0
    """GPUs that a cell takes."""
    nodes_cpus: int | None = None
    """CPU cores of the cluster that is started here; null: those of the machine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cpus < 1:
            raise ValueError(f"launcher.cpus is {self.cpus}; it must be at least 1")
        if self.gpus < 0:
            raise ValueError(f"launcher.gpus is {self.gpus}; it must not be negative")

    def check(self, devices: int) -> None:
        try:
            import ray  # noqa: F401
        except ImportError:
            raise ValueError("launcher=ray needs ray: pip install 'clozelab[ray]'") from None
        check_gpus(self.gpus, devices)
        if self.address is None and self.cpus > (here := self.nodes_cpus or cores()):
            raise ValueError(f"launcher.cpus is {self.cpus}, and the cluster that is started here has {here}; lower it")

    def threads(self, devices: int) -> int:
        return self.cpus

    def launch(self, jobs: list[Job], devices: int, follow: Follow) -> list[Outcome]:
        import ray

        started = not ray.is_initialized()
        if started:
            terminate = signal.getsignal(signal.SIGTERM)
            try:
                ray.init(
                    address=self.address or "local",  # None would join whatever cluster it finds here
                    num_cpus=self.nodes_cpus if self.address is None else None,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                )
            except (ConnectionError, ValueError) as error:
                said = str(error).splitlines()[0]
                raise ValueError(f"launcher.address={self.address}: no cluster answers there ({said})") from error
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, terminate)  # Ray puts a handler of its own there, which ends us at once
        try:
            self._check_room(ray.nodes())  # type: ignore[no-untyped-call]
        except ValueError:
            if started:
                ray.shutdown()
            raise
        # A worker that is lost is Ray's to replace (max_retries); a cell that fails is ours (`retries`).
        remote: Any = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=max(3, self.retries))(_supervised)
        own = {key: value for key, value in os.environ.items() if key.startswith(_OWN)}
        threads, here = self.threads(devices), os.getcwd()
        handles = {job.directory: remote.remote(job.absolute, self.limits, threads, own, here) for job in jobs}

        def ended(job: Job) -> Outcome | None:
            handle = handles[job.directory]
            if not ray.wait([handle], timeout=0)[0]:
                return None
            try:
                outcome: Outcome = ray.get(handle)
                return outcome
            except Exception as error:  # its worker was lost too often: the directory knows more
                said = f"{type(error).__name__}: {error}".splitlines()[0]
                return outcome_of_lost(job, f"its Ray task was lost: {said}")

        try:
            # Not by force: `supervise` is interrupted, and ends its cell politely.
            return wait_for_all(jobs, ended, follow, self.fail_fast, lambda job: ray.cancel(handles[job.directory]))
        finally:
            if started:
                ray.shutdown()

    def _check_room(self, nodes: list[dict[str, Any]]) -> None:
        """Refuse a cell that no node of the cluster could hold: Ray would wait for one without a word.

        Raises:
            ValueError: names what the nodes have.
        """
        has = [node["Resources"] for node in nodes if node["Alive"]]
        if not any(one.get("CPU", 0) >= self.cpus and one.get("GPU", 0) >= self.gpus for one in has):
            rooms = "; ".join(f"{one.get('CPU', 0):g} CPUs, {one.get('GPU', 0):g} GPUs" for one in has)
            raise ValueError(
                f"no node of the Ray cluster has launcher.cpus={self.cpus} and launcher.gpus={self.gpus:g} (there are: "
                f"{rooms}); lower them, or start a larger one"
            )


def _supervised(job: Job, limits: Limits, threads: int, own: dict[str, str], here: str) -> Outcome:
    """In a worker: with the settings and the working directory of who launched it, which the cell's paths assume."""
    with contextlib.suppress(OSError):
        os.chdir(here)
    return supervise(job, limits, environment_of(threads) | own)
