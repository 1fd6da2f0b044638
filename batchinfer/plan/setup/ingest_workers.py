"""The number of processes that read a job's rows."""

from __future__ import annotations

from batchinfer.job import Job
from batchinfer.machine.cpus import usable_cpus
from batchinfer.machine.memory import available_memory
from batchinfer.plan.setup.resolve import Setting

# Of one process that reads rows. Measured: 135 MiB with a vocabulary of 32,000 tokens.
WORKER_BYTES = 256 << 20


def ingest_workers(job: Job, setting: Setting) -> int:
    """Return how many processes read the job's rows: as many as there are cores and memory for. An engine on a CPU has
    not begun to compute then; one on a GPU is loaded meanwhile, and keeps a core."""
    if job.input.workers != "auto":
        return job.input.workers
    cores = usable_cpus() - (setting.replicas if setting.device == "cuda" else 0)
    return max(1, min(cores, available_memory() // WORKER_BYTES))
