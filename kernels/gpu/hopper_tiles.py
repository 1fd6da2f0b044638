"""How prompts' attention for compute capability 9.0 is cut, and what it reads."""

from __future__ import annotations

from batchinfer_kernels.gpu.attention_launch import MAX_HEAD_DIM, padded_dim

GROUPS = 2  # warp groups that multiply
ROWS = 64  # of each
TILE = {64: 128, 128: 128, 256: 64}  # keys of a tile, by the padded head size
STAGES = 2  # tiles of keys in flight, and of values
# Of the threads of each partition. Warp groups take registers from what a launch of 3 × 128 threads begins with
MULTIPLIER_REGISTERS, LOADER_REGISTERS, LAUNCH_REGISTERS = 232, 40, 168
ALIGNED_VALUES = 8  # of a head: the hardware copies rows that lie multiples of 16 bytes apart
LEAST_BLOCK = 8  # the rows after which its pattern of banks repeats


def why_not(head_dim: int, block_size: int, window: int | None = None) -> str | None:
    """Return the reason why the kernel does not read such a cache; None if it does."""
    if head_dim % ALIGNED_VALUES or head_dim > MAX_HEAD_DIM:
        return f"heads of {head_dim} are not a multiple of {ALIGNED_VALUES} up to {MAX_HEAD_DIM}"
    most = TILE[padded_dim(head_dim)]
    if block_size & (block_size - 1) or not LEAST_BLOCK <= block_size <= most:
        return f"blocks of {block_size} are not a power of 2 from {LEAST_BLOCK} to {most}"
    if window is not None and window < block_size:
        return f"a window of {window} is shorter than a block of {block_size}"
    return None


def hopper_tokens(group: int) -> int:
    """How many tokens an item may have: `prefill_items`' `tokens_per_item`."""
    return GROUPS * ROWS // group
