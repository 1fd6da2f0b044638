"""Determines the machine on which the engines of a job run, and the transport that starts them."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from batchinfer.core.errors import JobFileError, Mistake, Unavailable
from batchinfer.core.wording import counted
from batchinfer.filesystem.json_files import read_strings
from batchinfer.filesystem.state import StateFolder
from batchinfer.job import Job
from batchinfer.machine.facts import MachineFacts, this_machine
from batchinfer.pipeline.workers.transport import PROCESSES, Transport

RAY_FROM, RAY_BELOW = (2, 52), (3,)
_INSTALL = "`pip install '.[ray]'` in the clone of batchinfer"


@dataclass(frozen=True, slots=True)
class EngineMachine:
    """The machine on which engines run: this machine, or nodes of a Ray cluster.

    Attributes:
        facts: Device, memory and cores of the machine. On a cluster: the part of a node that one engine gets.
        transport: Starts workers and exchanges messages with them.
        reader: If engines run on a cluster: this machine, which reads the rows. Else None.
    """

    facts: MachineFacts
    transport: Transport
    reader: MachineFacts | None = None


def engine_machine(
    job: Job,
    state: StateFolder,
    otherwise: Transport = PROCESSES,
    notice: Callable[[str], None] = lambda _: None,
    waiting: Callable[[], None] | None = None,
) -> EngineMachine:
    """Return the machine on which the engines of a job run. Connects to the job's Ray cluster, if it has one.

    Args:
        job: The job.
        state: The job's state folder, which stores digests of model files.
        otherwise: Starts the workers of a job without `ray.address`.
        notice: Called with lines for the user.
        waiting: Called while the run waits for a node; raises an error to end the wait. None: do not wait.

    Raises:
        Unavailable: ray is not installed, or there is no cluster, or none of its nodes can run an engine.
    """
    if job.ray is None:
        return EngineMachine(this_machine(job.engine.device), otherwise)
    _check_ray()
    _check_output(job)
    hook = sys.excepthook
    from batchinfer.pipeline.workers.ray.cluster import cluster_engines
    from batchinfer.pipeline.workers.ray.ray_transport import RayTransport

    sys.excepthook = hook  # importing ray replaces it

    def wait(seconds: float) -> bool:
        if waiting is None:
            return False
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            waiting()
            time.sleep(0.1)
        return True

    engines = cluster_engines(job, notice, wait)
    fit = f"{counted(engines.machine.engines, 'engine')} with {engines.share} each"
    notice(f"Ray cluster {engines.address}: room for {fit}, on {engines.facts.machine.hardware.name}")
    any_class = job.ray.classes == "any" and not job.engine.deterministic
    transport = RayTransport(engines, any_class, job.ray.wait_s, read_strings(state.fingerprints))
    return EngineMachine(engines.machine, transport, reader=this_machine("cpu"))


def _check_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise Unavailable(f"ray.address: ray is not installed; run {_INSTALL}")
    found = version("ray")
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    if not RAY_FROM <= numbers < RAY_BELOW:
        raise Unavailable(f"ray.address: ray {found} is installed, and 2.52 to 2.x is needed; run {_INSTALL}")


def _check_output(job: Job) -> None:
    if "runtime_resources" in job.output.path.parts:
        text = "is in the working directory of a submitted job, which Ray deletes; give an absolute path elsewhere"
        raise JobFileError(str(job.source), [Mistake("output.path", text)])
