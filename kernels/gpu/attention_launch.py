"""The parts that the launchers of the attention kernels share: tile sizes, and the arguments that every kernel
takes."""

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
FEWEST_ROWS = 16  # that a tensor core multiplies
MAX_GROUP = 16
MAX_HEAD_DIM = 256
# Keys that make a segment in the deterministic mode. Long enough that partial sums are little beside the keys: at 16
# query heads a KV head they are 16 × 4 bytes a value of the head for 1024 × 2 × 2 of the cache, 1.6%.
SEGMENT = 1024
# Keys below which a sequence is not split: 256 keys of 128 bf16 values, K and V, are 128 KiB, several times what one
# multiprocessor has to keep in flight to reach its share of the bandwidth.
LEAST_SEGMENT = 256
# Programs a multiprocessor that a split aims at: a few for it to hold at once, and to even out unequal ones
PROGRAMS_PER_PROCESSOR = 4
PREFIX_PROGRAMS_PER_PROCESSOR = 2
STRIDES = ("q_stride_token", "q_stride_head", "stride_block", "stride_head", "stride_key")
# What differs from step to step: Triton would compile a kernel anew where such a number is 1 or a multiple of 16
VARYING = ["stride_table", "first_own"]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class KVTiles:
    """How a kernel is cut: rows and keys of a tile, warps, and tiles in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


# By the padded head size, for values of 2 bytes. All compile without spilling, with any window, cap and code. With five
# in flight the loop waits for all but three, with three or four for everything: an address comes from a block table
# that has to be there first. Heads of 128 were measured on an H100 (others were not): prefill 345 and 386 TFLOP/s with
# these tiles, 294 and 315 with (128, 64, 8, 3); decode 3.00 and 2.78 TB/s, 2.77 and 2.58 with (16, 64, 4, 5); decode on
# int8 2.51 instead of 2.00, on float8 2.07 instead of 1.77. (128, 128, 8, 5) was a little faster yet, and spills.
_HALF: dict[Work, dict[int, KVTiles]] = {
    "prefill": {64: KVTiles(128, 64, 4, 5), 128: KVTiles(64, 64, 4, 5), 256: KVTiles(64, 32, 8, 5)},
    "decode": {64: KVTiles(16, 64, 4, 5), 128: KVTiles(16, 128, 8, 3), 256: KVTiles(16, 32, 4, 5)},
    "coded decode": {64: KVTiles(16, 64, 4, 5), 128: KVTiles(16, 64, 2, 6), 256: KVTiles(16, 32, 4, 5)},
    "drafts": {64: KVTiles(64, 64, 4, 5), 128: KVTiles(64, 64, 4, 5), 256: KVTiles(64, 32, 8, 5)},
    "prefix": {64: KVTiles(128, 64, 4, 5), 128: KVTiles(128, 64, 8, 5), 256: KVTiles(64, 32, 8, 5)},
    "deterministic": {64: KVTiles(64, 64, 4, 3), 128: KVTiles(64, 64, 8, 2), 256: KVTiles(64, 16, 8, 1)},
}
# Where tensor cores take their operands from registers: compute capabilities 8.x and 12.x, and AMD
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
    """`head_dim`: as the model has it. `coded`: the cache holds codes, whose scales take registers. There are as many
    rows as without, by which a plan cuts queries for caches of both kinds, and perhaps fewer keys or more warps.

    AMD's compute units have 64 KiB of shared memory, for one tile in flight; warps of 64 threads; and 512 registers a
    thread where there are at most 4 of them.
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
    """Return the tiles of decode attention for so many rows of a sequence, or for as many of them as fit into one.
    `trees`: some are in trees of drafts."""
    coded = codes != "none"
    if work == "deterministic" or rows <= FEWEST_ROWS:
        return _tiles(arch, work, dtype, padded, coded)
    tiles = _tiles(arch, "drafts", dtype, padded, coded)
    tiles = replace(tiles, rows=min(tiles.rows, next_power_of_2(rows)))
    if trees and coded and dtype != torch.float32 and arch == "90":
        return _for_trees(tiles, padded, codes)
    return tiles


def _for_trees(tiles: KVTiles, padded: int, codes: str) -> KVTiles:
    """Return tiles that compile without spilling where codes are widened in two loops, of which one masks trees. With
    eight warps the assembler stays within 128 registers; 64 rows of the largest heads take more than there are. Not
    measured."""
    if padded == 128 and tiles.rows == 32:
        return replace(tiles, warps=4)
    if padded == 256 and codes == "fp8":
        return replace(tiles, rows=min(tiles.rows, 32))
    return tiles


def _for_codes(arch: str, work: Work, tiles: KVTiles, padded: int) -> KVTiles:
    """Return tiles that compile without spilling with codes, where tiles without codes barely do. Not measured."""
    if work == "coded decode":
        # Two warps, which an H100 was measured with, spill with heads of 72 and 80 on compute capability 10.0
        return KVTiles(16, 64, 4, 5) if arch == "100" and padded == 128 else tiles
    if work == "decode" or (work == "deterministic" and _from_memory(arch)):
        return tiles
    if work == "deterministic" and arch.isdigit() and padded < MAX_HEAD_DIM:
        return replace(tiles, keys=16, warps=8, stages=2)
    halved = tiles.warps == 8 or padded == 64
    keys = max(32 if _from_memory(arch) else 16, tiles.keys // 2) if halved else tiles.keys
    return replace(tiles, keys=keys, warps=8)


def _from_memory(arch: str) -> bool:
    """Whether tensor cores take operands from shared memory; where nothing is compiled, it shall be so."""
    return arch == "" or (arch.isdigit() and 90 <= int(arch) < 120)


def padded_dim(head_dim: int) -> int:
    """Tiles have sizes that are powers of 2."""
    return max(64, next_power_of_2(head_dim))


def choose_segment(total_keys: int, kv_heads: int, device: torch.device) -> int:
    """How many keys one program should pass over, so that all programs together fill the GPU evenly.

    `total_keys`: of all rows. A row with more than this is split: into segments of at most so many keys there are no
    more of them than rows, and PROGRAMS_PER_PROCESSOR × processors / kv_heads.
    """
    programs = PROGRAMS_PER_PROCESSOR * processors(device)
    return max(LEAST_SEGMENT, -(-total_keys * kv_heads // programs))


def prefix_segment(total_keys: int, kv_heads: int, device: torch.device) -> int:
    """Return how many keys of a shared prefix one program should pass over.

    `total_keys`: of all tiles of rows together. A part of a full tile of rows is dear, so that fewer programs have to
    do.
    """
    programs = PREFIX_PROGRAMS_PER_PROCESSOR * processors(device)
    return max(LEAST_SEGMENT, next_power_of_2(-(-total_keys * kv_heads // programs)))


def moved(
    values: NDArray[Any], device: torch.device, dtype: type[np.int32] | type[np.int64] = np.int32
) -> Tensor:
    """On the device, by a copy that nobody waits for: it is queued before what reads it."""
    return staged(np.ascontiguousarray(values, dtype), device).to(device, non_blocking=True)


def staged(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return the values on the host, in memory from which a GPU copies without anybody waiting for it."""
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
    """Raises ValueError for what the kernels do not cover."""
    check_paged_attention(q, k_cache, v_cache, block_tables)
    check_attention_extras(q, k_cache, sinks, k_scale, v_scale)
    group, dim = q.shape[1] // k_cache.shape[1], q.shape[2]
    if group > MAX_GROUP or dim > MAX_HEAD_DIM:
        raise ValueError(f"{group} heads of {dim} share a KV head; at most {MAX_GROUP} of {MAX_HEAD_DIM} may")
    if q.dtype not in FLOATS or q.stride(2) != 1:
        raise ValueError(f"q is {q.dtype} with strides {q.stride()}")
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (q.dtype, torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"caches of {k_cache.dtype} and {v_cache.dtype} are not read with q of {q.dtype}")
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
    """Return the arguments that all kernels that read the cache are launched with. Those that layers have in common are
    computed once. `queries`: the most that a sequence has in decode attention; `trees`: some are in
    trees of drafts. Raises ValueError for a scale that is
    not greater than 0: the largest score has to stay the largest when it is scaled."""
    scale, window, soft_cap = rules.scale, rules.window, rules.soft_cap
    if not scale > 0:
        raise ValueError(f"scores are multiplied by {scale}, which is not greater than 0")
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
    """How the values of a cache are coded, as the kernels take them."""
    if dtype == torch.int8:
        return "int8"
    if dtype != torch.float8_e4m3fn:
        return "none"
    # float8_e4m3fn is known from compute capability 8.9 on; AMD's CDNA 3 knows a format with another bias
    return "fp8" if arch.isdigit() and int(arch) >= 89 else "fp8_bits"


@lru_cache(maxsize=64)
def _strides(strides: tuple[int, ...]) -> dict[str, int]:
    # Values: Triton by itself sees no divisor but 16, which 72 has not. Products of 32 bits have to hold the strides.
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
    """Return the constants and options that a kernel is compiled for."""
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
        # Products and sums are contracted where the code says so, not where a kernel's compilation happens to
        "enable_fp_fusion": not deterministic,
        **_registers(arch, tiles, dtype, head_dim, deterministic),
    }


def _registers(
    arch: str, tiles: KVTiles, dtype: torch.dtype, head_dim: int, deterministic: bool
) -> dict[str, int]:
    """Up to all that a thread can have where a kernel wants many: products of float32, many rows of large heads.

    Without a bound NVIDIA's assembler aims at a count that lets more warps be resident (80, 128 or 168), and spills
    where a kernel would take a few more. With one it hoists so much that kernels with operands in registers spill,
    unless heads are the largest. AMD's compiler has no such option.
    """
    padded = padded_dim(head_dim)
    large = padded == MAX_HEAD_DIM or (padded == 128 and deterministic and _from_memory(arch))
    wants_many = dtype == torch.float32 or (large and tiles.rows > 16)
    return {"maxnreg": 255} if wants_many and arch.isdigit() else {}


def _precision(arch: str, head_dim: int) -> str:
    """How float32 is multiplied; products of other types are exact in any case.

    As three products of tensor cores, which leave out about 2^-22 (Ootomo and Yokota, 2022): without tensor cores all
    but the smallest tiles spill registers on compute capability 9.0; with them the largest heads do.
    """
    return "tf32x3" if arch.isdigit() and padded_dim(head_dim) < 256 else "ieee"
