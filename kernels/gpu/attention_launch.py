"""The parts that all launchers of attention kernels share: tile sizes and common arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import gcd
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer_kernels.gpu.checks import check_contiguous
from batchinfer_kernels.gpu.sizes import next_power_of_2
from batchinfer_kernels.gpu.target import architecture, processors
from batchinfer_kernels.paged_attention import ScoreRules, check_attention_extras, check_paged_attention

Work = Literal["prefill", "decode", "coded decode", "drafts", "prefix", "deterministic"]
FEWEST_ROWS = 16  # the smallest number of rows of a tensor core product
MAX_GROUP = 16
MAX_HEAD_DIM = 256
# Keys of a segment in deterministic mode. Long enough to make partial sums cheap: with 16 query heads per KV head they
# take 16 × 4 bytes per value of a head, 1.6% of the 1024 × 2 × 2 bytes of the cache
SEGMENT = 1024
# The smallest segment of a split sequence, in keys. K and V of 256 keys of 128 bf16 values are 128 KiB, several times
# the bytes in flight with which a multiprocessor reaches its share of the bandwidth
LEAST_SEGMENT = 256
# Target number of programs per multiprocessor: several can be resident at once and balance unequal ones
PROGRAMS_PER_PROCESSOR = 4
PREFIX_PROGRAMS_PER_PROCESSOR = 2
STRIDES = ("q_stride_token", "q_stride_head", "stride_block", "stride_head", "stride_key")
# Arguments that differ between steps. Without do_not_specialize Triton recompiles for 1 and for multiples of 16
VARYING = ["stride_table", "first_own"]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class KVTiles:
    """The tile of query rows and keys that an attention kernel computes at a time, and its launch options.

    Attributes:
        rows: number of query rows of a tile: queries × query heads per KV head.
        keys: number of keys of a tile.
        warps: number of warps of a program.
        stages: number of stages of the compiler's software pipeline.
    """

    rows: int
    keys: int
    warps: int
    stages: int


# Tiles by padded head size, for 16-bit values. All compile without spilling for any window, cap and quantisation. With
# five stages up to three loads stay in flight; with three or four none does, because addresses come from a block table
# that is loaded first. Measured on an H100 for heads of 128 only: prefill 345 and 386 TFLOP/s with these tiles, 294 and
# 315 with (128, 64, 8, 3); decode 3.00 and 2.78 TB/s, 2.77 and 2.58 with (16, 64, 4, 5); decode of int8 2.51 instead of
# 2.00, of float8 2.07 instead of 1.77. (128, 128, 8, 5) was slightly faster, but spills
_HALF: dict[Work, dict[int, KVTiles]] = {
    "prefill": {64: KVTiles(128, 64, 4, 5), 128: KVTiles(64, 64, 4, 5), 256: KVTiles(64, 32, 8, 5)},
    "decode": {64: KVTiles(16, 64, 4, 5), 128: KVTiles(16, 128, 8, 3), 256: KVTiles(16, 32, 4, 5)},
    "coded decode": {64: KVTiles(16, 64, 4, 5), 128: KVTiles(16, 64, 2, 6), 256: KVTiles(16, 32, 4, 5)},
    "drafts": {64: KVTiles(64, 64, 4, 5), 128: KVTiles(64, 64, 4, 5), 256: KVTiles(64, 32, 8, 5)},
    "prefix": {64: KVTiles(128, 64, 4, 5), 128: KVTiles(128, 64, 8, 5), 256: KVTiles(64, 32, 8, 5)},
    "deterministic": {64: KVTiles(64, 64, 4, 3), 128: KVTiles(64, 64, 8, 2), 256: KVTiles(64, 16, 8, 1)},
}
# For tensor cores that read operands from registers: compute capabilities 8.x and 12.x, and AMD
_HALF_OF_REGISTERS: dict[Work, dict[int, KVTiles]] = {
    "prefill": {64: KVTiles(128, 64, 8, 3), 128: KVTiles(128, 32, 8, 3), 256: KVTiles(32, 32, 8, 2)},
    "decode": {64: KVTiles(16, 64, 4, 5), 128: KVTiles(16, 64, 4, 5), 256: KVTiles(16, 32, 4, 5)},
    "coded decode": {64: KVTiles(16, 64, 4, 5), 128: KVTiles(16, 64, 4, 5), 256: KVTiles(16, 32, 4, 5)},
    "drafts": {64: KVTiles(64, 64, 4, 3), 128: KVTiles(64, 32, 4, 3), 256: KVTiles(32, 32, 8, 2)},
    "prefix": {64: KVTiles(128, 64, 4, 3), 128: KVTiles(128, 32, 8, 3), 256: KVTiles(64, 32, 8, 2)},
    "deterministic": {64: KVTiles(64, 64, 4, 3), 128: KVTiles(64, 64, 8, 2), 256: KVTiles(32, 32, 8, 2)},
}
_SINGLE: dict[Work, dict[int, KVTiles]] = {
    "prefill": {64: KVTiles(16, 32, 4, 2), 128: KVTiles(16, 32, 4, 2), 256: KVTiles(16, 16, 8, 1)},
    "decode": {64: KVTiles(16, 32, 4, 3), 128: KVTiles(16, 32, 4, 3), 256: KVTiles(16, 16, 8, 1)},
    "coded decode": {64: KVTiles(16, 32, 4, 3), 128: KVTiles(16, 32, 4, 3), 256: KVTiles(16, 16, 8, 1)},
    "drafts": {64: KVTiles(16, 32, 4, 3), 128: KVTiles(16, 32, 4, 3), 256: KVTiles(16, 16, 8, 1)},
    "prefix": {64: KVTiles(64, 32, 8, 2), 128: KVTiles(16, 32, 4, 2), 256: KVTiles(16, 16, 8, 1)},
    "deterministic": {64: KVTiles(16, 32, 4, 2), 128: KVTiles(16, 32, 4, 2), 256: KVTiles(16, 16, 8, 1)},
}


def choose_tiles(work: Work, dtype: torch.dtype, head_dim: int, coded: bool = False) -> KVTiles:
    """Return the tiles of an attention kernel for this GPU.

    The number of rows does not depend on `coded`.

    Args:
        work: kind of kernel, such as "decode".
        dtype: dtype of q.
        head_dim: head size of the model, not padded.
        coded: True for a quantised cache.
    """
    return _tiles(architecture(), work, dtype, padded_dim(head_dim), coded)


@cache
def _tiles(arch: str, work: Work, dtype: torch.dtype, padded: int, coded: bool) -> KVTiles:
    half = _HALF if _from_memory(arch) else _HALF_OF_REGISTERS
    tiles = (_SINGLE if dtype == torch.float32 else half)[work][padded]
    if coded and dtype != torch.float32:
        tiles = _for_codes(arch, work, tiles, padded)
    if arch.startswith("gfx"):
        return KVTiles(tiles.rows, min(tiles.keys, 32), min(tiles.warps, 4), 1)
    return tiles


def _decode_tiles(
    arch: str, work: Work, dtype: torch.dtype, padded: int, codes: str, rows: int, trees: bool
) -> KVTiles:
    coded = codes != "none"
    if work == "deterministic" or rows <= FEWEST_ROWS:
        return _tiles(arch, work, dtype, padded, coded)
    tiles = _tiles(arch, "drafts", dtype, padded, coded)
    tiles = replace(tiles, rows=min(tiles.rows, next_power_of_2(rows)))
    if trees and coded and dtype != torch.float32 and arch == "90":
        return _for_trees(tiles, padded, codes)
    return tiles


def _for_trees(tiles: KVTiles, padded: int, codes: str) -> KVTiles:
    # Registers must not spill with a quantised cache and draft trees: with eight warps the assembler uses at most 128,
    # and 64 rows of the largest heads need more. Not measured
    if padded == 128 and tiles.rows == 32:
        return replace(tiles, warps=4)
    if padded == 256 and codes == "fp8":
        return replace(tiles, rows=min(tiles.rows, 32))
    return tiles


def _for_codes(arch: str, work: Work, tiles: KVTiles, padded: int) -> KVTiles:
    # Registers must not spill with a quantised cache. Not measured
    if work == "coded decode":
        # The two warps measured on an H100 spill with heads of 72 and 80 on compute capability 10.0
        return KVTiles(16, 64, 4, 5) if arch == "100" and padded == 128 else tiles
    if work == "decode" or (work == "deterministic" and _from_memory(arch)):
        return tiles
    if work == "deterministic" and arch.isdigit() and padded < MAX_HEAD_DIM:
        return replace(tiles, keys=16, warps=8, stages=2)
    halved = tiles.warps == 8 or padded == 64
    keys = max(32 if _from_memory(arch) else 16, tiles.keys // 2) if halved else tiles.keys
    return replace(tiles, keys=keys, warps=8)


def _from_memory(arch: str) -> bool:
    return arch == "" or (arch.isdigit() and 90 <= int(arch) < 120)


def padded_dim(head_dim: int) -> int:
    """Return the number of values of a head in a tile: a power of 2 that is at least `head_dim` and 64."""
    return max(64, next_power_of_2(head_dim))


def choose_segment(total_keys: int, kv_heads: int, device: torch.device) -> int:
    """Return the number of keys that one program of decode attention reads, so that the programs fill the GPU evenly.

    A sequence with more keys is split among several programs. The result is at least LEAST_SEGMENT.

    Args:
        total_keys: number of keys of all sequences.
        kv_heads: number of KV heads; each has its own programs.
        device: the GPU.
    """
    programs = PROGRAMS_PER_PROCESSOR * processors(device)
    return max(LEAST_SEGMENT, -(-total_keys * kv_heads // programs))


def prefix_segment(total_keys: int, kv_heads: int, device: torch.device) -> int:
    """Return the number of keys of a shared prefix that one program reads, a power of 2.

    The programs are fewer than with `choose_segment`, because a program computes a full tile of rows.

    Args:
        total_keys: number of keys to read: shared keys × tiles of query rows, summed over groups.
        kv_heads: number of KV heads; each has its own programs.
        device: the GPU.
    """
    programs = PREFIX_PROGRAMS_PER_PROCESSOR * processors(device)
    return max(LEAST_SEGMENT, next_power_of_2(-(-total_keys * kv_heads // programs)))


def copy_to_device(
    values: NDArray[Any], device: torch.device, dtype: type[np.int32] | type[np.int64] = np.int32
) -> Tensor:
    """Copy values to the device as a tensor of `dtype` without blocking the host.

    Kernels that are launched later may read the tensor, because they run after the copy.
    """
    return copy_to_pinned(np.ascontiguousarray(values, dtype), device).to(device, non_blocking=True)


def copy_to_pinned(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return the values as a tensor in pinned host memory, which a GPU copies without blocking the host.

    If `device` is a CPU, the tensor shares the memory of `values`.
    """
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def check_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Raise ValueError unless the attention kernels support the tensors: shapes, dtypes, strides and head size."""
    check_paged_attention(q, k_cache, v_cache, block_tables)
    check_attention_extras(q, k_cache, sinks, k_scale, v_scale)
    group, dim = q.shape[1] // k_cache.shape[1], q.shape[2]
    if group > MAX_GROUP or dim > MAX_HEAD_DIM:
        raise ValueError(
            f"{group} heads of {dim} share a KV head; at most {MAX_GROUP} of {MAX_HEAD_DIM} are supported"
        )
    if q.dtype not in FLOATS or q.stride(2) != 1:
        raise ValueError(f"q is {q.dtype} with strides {q.stride()}")
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (q.dtype, torch.int8, torch.float8_e4m3fn):
        raise ValueError(
            f"caches of {k_cache.dtype} and {v_cache.dtype} are not supported with q of {q.dtype}"
        )
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise ValueError(f"caches have strides {k_cache.stride()} and {v_cache.stride()}")
    check_contiguous(k_scale=k_scale, v_scale=v_scale)
    if block_tables.dtype != torch.int32 or block_tables.stride(1) != 1:
        raise ValueError(f"block tables are {block_tables.dtype} with strides {block_tables.stride()}")


def kernel_arguments(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    rules: ScoreRules,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    work: Work,
    queries: int = 1,
    trees: bool = False,
) -> dict[str, Any]:
    """Return the arguments that all attention kernels over a KV cache share, by name.

    Args:
        q: (T, q_heads, D).
        k_cache: (blocks, kv_heads, block_size, D).
        v_cache: as `k_cache`.
        block_tables: (sequences, blocks) int32.
        rules: scale, sliding window, cap, sinks and bias of scores.
        k_scale: (blocks, kv_heads, block_size) float32, for a quantised cache.
        v_scale: as `k_scale`.
        work: kind of kernel, such as "decode"; it determines the tiles.
        queries: maximum number of queries of a sequence in decode attention.
        trees: True if some queries are in draft trees.

    Raises:
        ValueError: If the scale is not greater than 0: scaling must keep the order of scores.
    """
    scale, window, soft_cap = rules.scale, rules.window, rules.soft_cap
    if not scale > 0:
        raise ValueError(f"the scale of scores is {scale}; it must be greater than 0")
    arch, codes = architecture(), _codes(k_cache.dtype, architecture())
    bits = codes == "fp8_bits"
    strides = (*q.stride()[:2], *k_cache.stride()[:3])
    heads = (q.shape[1] // k_cache.shape[1], q.shape[2], k_cache.shape[2])
    return {
        "q_ptr": q,
        "k_ptr": k_cache.view(torch.uint8) if bits else k_cache,
        "v_ptr": v_cache.view(torch.uint8) if bits else v_cache,
        "tables_ptr": block_tables,
        "k_scale_ptr": k_scale,
        "v_scale_ptr": v_scale,
        "stride_scale": 0 if k_scale is None else k_scale.stride(0),
        "stride_table": block_tables.stride(0),
        "scale": float(scale),
        "cap": float(soft_cap or 0.0),
        "window": window or 0,
        "WINDOW": window is not None,
        "CAP": soft_cap is not None,
        "CODES": codes,
        **_strides(strides),
        **_options(arch, work, q.dtype, *heads, codes, queries, trees),
    }


def _codes(dtype: torch.dtype, arch: str) -> str:
    if dtype == torch.int8:
        return "int8"
    if dtype != torch.float8_e4m3fn:
        return "none"
    # float8_e4m3fn is supported from compute capability 8.9 on; AMD's CDNA 3 has a format with another bias
    return "fp8" if arch.isdigit() and int(arch) >= 89 else "fp8_bits"


@lru_cache(maxsize=64)
def _strides(strides: tuple[int, ...]) -> dict[str, int]:
    # Pass the common divisor, because Triton only detects multiples of 16, and heads may have 72 values. Strides that
    # exceed 32 bits are passed as they are
    unit = gcd(*strides, 16) if max(strides) < 2**31 else 1
    return {**dict(zip(STRIDES, (stride // unit for stride in strides), strict=True)), "UNIT": unit}


@cache
def _options(
    arch: str,
    work: Work,
    dtype: torch.dtype,
    group: int,
    head_dim: int,
    block_size: int,
    codes: str,
    queries: int,
    trees: bool,
) -> dict[str, Any]:
    rows = group * queries if queries > 1 else 1
    tiles = _decode_tiles(arch, work, dtype, padded_dim(head_dim), codes, rows, trees)
    deterministic = work == "deterministic"
    return {
        "D": head_dim,
        "D_PAD": padded_dim(head_dim),
        "GROUP": group,
        "ROWS": tiles.rows,
        "TILE": tiles.keys,
        "BLOCK_SIZE": block_size,
        "PRECISION": _precision(arch, head_dim),
        "SEGMENTED": deterministic,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        # In deterministic mode only explicit fma is contracted, independent of how a kernel is compiled
        "enable_fp_fusion": not deterministic,
        **_registers(arch, tiles, dtype, head_dim, deterministic),
    }


def _registers(
    arch: str, tiles: KVTiles, dtype: torch.dtype, head_dim: int, deterministic: bool
) -> dict[str, int]:
    # Without a bound, NVIDIA's assembler aims at 80, 128 or 168 registers to keep more warps resident, and spills if a
    # kernel needs a few more. With a bound it hoists more loads, and kernels with operands in registers spill unless
    # heads are the largest. AMD's compiler has no such option
    padded = padded_dim(head_dim)
    large = padded == MAX_HEAD_DIM or (padded == 128 and deterministic and _from_memory(arch))
    wants_many = dtype == torch.float32 or (large and tiles.rows > 16)
    return {"maxnreg": 255} if wants_many and arch.isdigit() else {}


def _precision(arch: str, head_dim: int) -> str:
    # "tf32x3" is three products of tensor cores with an error of about 2^-22 (Ootomo and Yokota, 2022). Without tensor
    # cores only the smallest tiles do not spill on compute capability 9.0; with them the largest heads spill
    return "tf32x3" if arch.isdigit() and padded_dim(head_dim) < 256 else "ieee"
