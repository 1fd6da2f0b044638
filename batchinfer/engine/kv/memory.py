"""Computes how many blocks the KV cache gets. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.core.errors import OutOfMemory
from batchinfer.core.wording import sizes
from batchinfer.engine.kv.table_sizes import TableSizes

# Share of a CPU's memory that is left once the weights are loaded: tokenising, publishing and other programs share it
CPU_FRACTION = 0.4
# A GPU is taken to be free for this job, and what steps take is measured, gaps between the allocator's segments
# included. What is not measured is kept back: code of kernels that are loaded later, graphs (some 70 in the warm-up, of
# a few MiB each, more in mid-job), and the products' work space of the stream that captures them; and a share for gaps
# that steps in another order than the measured one tear.
GPU_RESERVE, GPU_RESERVE_SHARE = 512 << 20, 0.02
# More blocks than all running sequences can fill at once keep prefixes alive between their users.
PREFIX_ROOM = 1.25


@dataclass(frozen=True, slots=True)
class JobSize:
    """The most that a job puts into the cache."""

    longest: int  # tokens of a sequence
    max_num_seqs: int
    max_num_batched_tokens: int


def cache_blocks(
    block_bytes: int,
    tables: TableSizes,
    job: JobSize,
    memory: int | float | None,
    free: int,
    kind: str,
    needed: int = 0,
) -> int:
    """Count the blocks that the job can use, within the memory that it may use.

    `memory`: bytes (int), a fraction of `free` (float), of which `needed` bytes are taken for what a step computes,
    or None for the device's default. Raises OutOfMemory when not even the job's longest sequence fits.
    """
    budget = memory if isinstance(memory, int) else _usable(memory, free, kind) - needed
    least = tables.alone(job.longest, job.max_num_batched_tokens)
    running = tables.among_others(job.longest) * job.max_num_seqs
    most = int(running * PREFIX_ROOM) + tables.for_chunks(job.max_num_batched_tokens) + 1
    blocks = min(budget // block_bytes, max(least, most))
    if blocks < least:
        needs, may = sizes(least * block_bytes, max(0, budget))
        raise OutOfMemory(
            f"the KV cache of the longest row ({job.longest} tokens) needs {needs} and {may} may be used; "
            "lower max_tokens or model.max_model_len, "
            "or raise engine.kv_memory"
        )
    return blocks


def _usable(fraction: float | None, free: int, kind: str) -> int:
    """Count the bytes of `free` that the cache and the steps may take together."""
    if fraction is None and kind == "cuda":
        return free - GPU_RESERVE - int(free * GPU_RESERVE_SHARE)
    return int(free * (CPU_FRACTION if fraction is None else fraction))
