"""The tiling of prefill attention for compute capability 9.0, and the caches that it supports."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer_kernels.gpu.attention_launch import MAX_HEAD_DIM, padded_dim

GROUPS = 2  # warp groups that multiply
ROWS = 64  # rows per group
TILE = {64: 128, 128: 128, 256: 64}  # keys of a tile, by padded head size
STAGES = 2  # tiles of keys in flight, and of values
ALIGNED_BYTES = 16  # tensor copies require strides that are multiples of this
LARGEST_CODED = 128  # largest head size with a quantised cache, limited by registers
LEAST_BLOCK = 8  # rows after which the swizzle pattern of shared memory repeats


@dataclass(frozen=True, slots=True)
class Registers:
    """The number of registers per thread of each kind of warp in the prefill kernel for compute capability 9.0.

    Attributes:
        multiplier: registers of the warp groups that multiply.
        widener: registers of the warp group that dequantises; 0: there is no such group.
        loader: registers of the warp that loads.
    """

    multiplier: int
    widener: int
    loader: int

    @property
    def launched(self) -> int:
        """Return the number of registers per thread at launch, the average over warp groups and the loading warp."""
        groups = GROUPS + (self.widener > 0) + 1
        return (GROUPS * self.multiplier + self.widener + self.loader) // groups


REGISTERS, REGISTERS_OF_CODES = Registers(232, 0, 40), Registers(200, 72, 40)


def why_not(head_dim: int, block_size: int, window: int | None = None, value_bytes: int = 2) -> str | None:
    """Return the reason why the prefill kernel for compute capability 9.0 does not support a cache; None if it does.

    Args:
        head_dim: number of values of a head.
        block_size: number of tokens of a block.
        window: sliding window of the layer; None: full attention.
        value_bytes: bytes of a cached value; 1 for a quantised cache.
    """
    multiple, largest = ALIGNED_BYTES // value_bytes, LARGEST_CODED if value_bytes == 1 else MAX_HEAD_DIM
    if head_dim % multiple or head_dim > largest:
        return f"the head size {head_dim} is not a multiple of {multiple} up to {largest}"
    most = TILE[padded_dim(head_dim)]
    if block_size & (block_size - 1) or not LEAST_BLOCK <= block_size <= most:
        return f"the block size {block_size} is not a power of 2 from {LEAST_BLOCK} to {most}"
    if window is not None and window < block_size:
        return f"a window of {window} is shorter than a block of {block_size}"
    return None


def hopper_tokens(group: int) -> int:
    """Return the maximum number of query tokens of a work item of `hopper_prefill`.

    Args:
        group: number of query heads per KV head.
    """
    return GROUPS * ROWS // group
