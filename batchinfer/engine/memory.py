"""Computes how many blocks the KV cache gets."""

from __future__ import annotations

import torch

from batchinfer.errors import OutOfMemory
from batchinfer.memory import available_memory
from batchinfer.sizes import sizes

# Share of the memory that is left once the weights are loaded. A CPU's memory is shared with tokenising, publishing
# and other programs; a GPU is taken to be free for this job.
AUTO_FRACTION = {"cpu": 0.4, "cuda": 0.9}
# More blocks than all running sequences can fill at once keep prefixes alive between their users.
PREFIX_ROOM = 1.25


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


def cache_blocks(
    block_bytes: int,
    block_size: int,
    longest: int,
    max_num_seqs: int,
    memory: int | float | None,
    free: int,
    kind: str,
    needed: int = 0,
) -> int:
    """As many blocks as the job can use, within what it may use.

    `memory`: bytes (int), a fraction of `free` (float), of which `needed` bytes are taken for what a step computes,
    or None for the device's default. Raises OutOfMemory when not even the job's longest sequence fits.
    """
    budget = memory if isinstance(memory, int) else int(free * (memory or AUTO_FRACTION[kind])) - needed
    per_sequence = -(-longest // block_size)
    blocks = min(budget // block_bytes, int(per_sequence * max_num_seqs * PREFIX_ROOM) + 1)
    if blocks < per_sequence:
        needs, may = sizes(per_sequence * block_bytes, max(0, budget))
        raise OutOfMemory(
            f"the KV cache of the longest row ({longest} tokens) needs {needs} and {may} may be used; "
            "lower max_tokens or model.max_model_len, "
            "or raise engine.kv_memory"
        )
    return blocks
