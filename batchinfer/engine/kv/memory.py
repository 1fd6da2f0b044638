"""Computes the number of blocks of the KV cache. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.core.errors import OutOfMemory
from batchinfer.core.wording import sizes
from batchinfer.engine.kv.table_sizes import TableSizes

# Default share of the free memory of a CPU after loading the weights. Tokenizing, publishing and other programs use the
# rest
CPU_FRACTION = 0.4
# Memory of a GPU that is kept free, in bytes and as a share. The memory of steps is measured and not included. The
# reserve is for kernels that are loaded later, for graphs (about 70 in the warm-up with a few MiB each, more later),
# for the work space of the capture stream, and for fragmentation.
GPU_RESERVE, GPU_RESERVE_SHARE = 512 << 20, 0.02
# Cache blocks relative to the blocks that all running sequences can fill. More than 1 keeps prefixes cached between
# uses
PREFIX_ROOM = 1.25


@dataclass(frozen=True, slots=True)
class JobSize:
    """The maximum sizes of a job's sequences and steps.

    Attributes:
        longest: The number of tokens, prompt and output, of the longest sequence.
        max_num_seqs: Maximum number of running sequences.
        max_num_batched_tokens: Maximum number of tokens per step.
    """

    longest: int
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
    """Return the number of KV cache blocks that fit into the memory, limited to the blocks that the job can use.

    Args:
        block_bytes: The bytes per block.
        tables: Computes the number of blocks of a sequence.
        job: The maximum sizes of the job.
        memory: An int is the memory for the KV cache in bytes. A float is the share of `free` for the KV cache and for
            steps. None: the default share for the kind of device.
        free: The free memory of the device in bytes.
        kind: The kind of device, "cpu" or "cuda".
        needed: The bytes that steps need. They are subtracted from the share of `free`, and ignored if `memory` is an
            int.

    Raises:
        OutOfMemory: If the longest sequence of the job does not fit.
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
    if fraction is None and kind == "cuda":
        return free - GPU_RESERVE - int(free * GPU_RESERVE_SHARE)
    return int(free * (CPU_FRACTION if fraction is None else fraction))
