"""How prompts' attention for compute capability 9.0 is cut, and what it reads."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer_kernels.gpu.attention_launch import MAX_HEAD_DIM, padded_dim

GROUPS = 2  # warp groups that multiply
ROWS = 64  # of each
TILE = {64: 128, 128: 128, 256: 64}  # keys of a tile, by the padded head size
STAGES = 2  # tiles of keys in flight, and of values
ALIGNED_BYTES = 16  # the hardware copies rows that lie multiples of so many apart
LARGEST_CODED = 128  # head whose codes are widened: registers for more are not there
LEAST_BLOCK = 8  # the rows after which its pattern of banks repeats


@dataclass(frozen=True, slots=True)
class Registers:
    """They are what a thread of each partition has, taken from what all threads begin with."""

    multiplier: int
    widener: int  # 0: there is none
    loader: int

    @property
    def launched(self) -> int:
        """Return with how many each begins; the loading warp counts as a group."""
        groups = GROUPS + (self.widener > 0) + 1
        return (GROUPS * self.multiplier + self.widener + self.loader) // groups


REGISTERS, REGISTERS_OF_CODES = Registers(232, 0, 40), Registers(200, 72, 40)


def why_not(head_dim: int, block_size: int, window: int | None = None, value_bytes: int = 2) -> str | None:
    """Return the reason why the kernel does not read such a cache; None if it does. `value_bytes`: 1 of codes."""
    multiple, largest = ALIGNED_BYTES // value_bytes, LARGEST_CODED if value_bytes == 1 else MAX_HEAD_DIM
    if head_dim % multiple or head_dim > largest:
        return f"heads of {head_dim} are not a multiple of {multiple} up to {largest}"
    most = TILE[padded_dim(head_dim)]
    if block_size & (block_size - 1) or not LEAST_BLOCK <= block_size <= most:
        return f"blocks of {block_size} are not a power of 2 from {LEAST_BLOCK} to {most}"
    if window is not None and window < block_size:
        return f"a window of {window} is shorter than a block of {block_size}"
    return None


def hopper_tokens(group: int) -> int:
    """Return how many tokens an item may have: `prefill_items`' `tokens_per_item`."""
    return GROUPS * ROWS // group
