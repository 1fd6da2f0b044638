"""The tiling of attention over latents: the rows of a tile are the heads of consecutive tokens of one sequence."""

from __future__ import annotations

from functools import cache

import torch

from batchinfer_kernels.gpu.attention_launch import KVTiles
from batchinfer_kernels.gpu.sizes import cdiv, next_power_of_2
from batchinfer_kernels.gpu.target import SMALL_MEMORY, architecture

# Limit of a tile's rows: the sums of 64 rows of 512 values take half of a multiprocessor's registers
MAX_ROWS = 64
SMALL, MEDIUM, LARGE = 128, 256, 512  # padded sizes of a latent, by which tiles are chosen
FEWEST_ROWS = 16  # the smallest number of rows of a tensor core product


def chunk_tokens(heads: int) -> int:
    """Return the maximum number of prompt tokens of a work item of attention over latents.

    Args:
        heads: number of query heads.
    """
    return max(1, MAX_ROWS // heads)


def head_tiles(heads: int) -> int:
    """Return the number of programs among which the query heads of a token are divided in attention over latents.

    Args:
        heads: number of query heads.
    """
    return cdiv(heads, MAX_ROWS)


def latent_tiles(dtype: torch.dtype, rank: int, rows: int, deterministic: bool) -> KVTiles:
    """Return the tiles of attention over latents for this GPU.

    Args:
        dtype: dtype of q.
        rank: number of values of a latent.
        rows: number of rows of a work item: queries × query heads. In deterministic mode the tiles do not depend on it.
        deterministic: True if a row's bits must not depend on other rows.
    """
    rows = FEWEST_ROWS if deterministic else min(MAX_ROWS, max(FEWEST_ROWS, next_power_of_2(rows)))
    return _tiles(architecture(), dtype, max(16, next_power_of_2(rank)), rows)


# By number of rows, for 16-bit values and latents of up to 512. All compile without spilling; none was measured. With
# three stages the block table is read one tile ahead of its latents, and two tiles of latents are in shared memory
_HALF = {16: KVTiles(16, 32, 8, 3), 32: KVTiles(32, 32, 8, 3), 64: KVTiles(64, 32, 8, 2)}
_HOPPER = {**_HALF, 64: KVTiles(64, 64, 8, 3)}
# For smaller latents, with which eight warps would leave too few registers per thread
_SMALL = {16: KVTiles(16, 16, 4, 3), 32: KVTiles(32, 16, 4, 3), 64: KVTiles(64, 32, 4, 2)}
_MEDIUM = KVTiles(16, 32, 4, 3)
_LARGEST = KVTiles(16, 16, 8, 2)  # for latents above LARGE
_SINGLE = KVTiles(16, 16, 8, 1)
_AMD = KVTiles(16, 16, 4, 1)  # AMD's compute units have 64 KiB of shared memory


@cache
def _tiles(arch: str, dtype: torch.dtype, padded: int, rows: int) -> KVTiles:
    if arch.startswith("gfx"):
        return _AMD
    if dtype == torch.float32:
        return _SINGLE
    if padded > LARGE:
        return _LARGEST
    if padded <= SMALL and (rows < MAX_ROWS or arch not in ("80", *SMALL_MEMORY)):
        return _SMALL[rows]
    if padded == MEDIUM and rows == FEWEST_ROWS:
        return _MEDIUM
    # 64 rows of 512 values and two tiles of latents take 112 KiB
    if padded > MEDIUM and arch in SMALL_MEMORY:
        return _HALF[min(rows, 32)]
    return (_HOPPER if arch in ("", "90") else _HALF)[rows]
