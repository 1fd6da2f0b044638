"""How matrix products are cut: tiles by what is multiplied and how many rows there are, and how the sums are split.

A tile's first side are outputs and its second rows of x: the weight is the left factor. So few rows make a narrow tile,
where tensor cores want at least 64 lines on the left, and a weight that is stored as codes becomes values in the
registers that it is multiplied from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from batchinfer_kernels.gpu.sizes import cdiv
from batchinfer_kernels.gpu.target import SMALL_MEMORY, architecture

# half: both of 16 bits; wide: x float32; coded: x of 16 bits and a weight of packed codes; fp8, int8: codes of both;
# block_fp8: fp8 with scales of blocks
Kind = Literal["half", "wide", "coded", "fp8", "block_fp8", "int8"]
# Programs that a deterministic product is split into at least where it has few outputs: about the processors of a large
# GPU. Not the processors of the GPU at hand: other GPUs of the same architecture shall give the same bits.
DETERMINISTIC_PROGRAMS = 128
# Inputs below which sums are not split: a program's first tiles come late, and its sums have to be written and read
LEAST_SEGMENT = 512
# Programs a multiprocessor that a split aims at
PROGRAMS_PER_PROCESSOR = 2
MANY = 1 << 30


@dataclass(frozen=True, slots=True)
class Tiles:
    """Outputs, rows and inputs of a tile, warps, and tiles in flight."""

    outputs: int
    rows: int
    inputs: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Tiles, and what becomes of their sums."""

    tiles: Tiles
    segment: int  # inputs that are summed in one go
    splits: int  # segments that are programs of their own; 1: a program passes over all of them
    segments: int

    @property
    def in_turn(self) -> bool:
        """Whether one program adds up several segments."""
        return self.segments > 1 and self.splits == 1


# By the most rows of x. Not measured: what compiles for compute capabilities 8.0, 9.0 and 10.0 without spilling and
# fits into their shared memory, in the range that published configurations have (Triton's tutorials and vLLM's tables
# for H100 and A100: 16 to 256 rows, 64 to 256 outputs, 64 or 128 bytes of inputs, 3 to 5 stages). Up to 64 rows reading
# the weight is the limit, which wants narrow tiles and many bytes in flight: 64 to 128 KiB a multiprocessor.
_TILES: dict[Kind, dict[int, Tiles]] = {
    "half": {
        16: Tiles(64, 16, 128, 4, 5),
        32: Tiles(64, 32, 128, 4, 5),
        64: Tiles(64, 64, 128, 4, 4),
        256: Tiles(128, 128, 64, 8, 4),
        MANY: Tiles(128, 256, 64, 8, 3),
    },
    "wide": {
        16: Tiles(64, 16, 32, 4, 3),
        MANY: Tiles(64, 64, 16, 4, 3),
    },
    "coded": {  # inputs: a span, whatever stands here
        16: Tiles(128, 16, 128, 4, 5),
        32: Tiles(128, 32, 128, 4, 4),
        64: Tiles(64, 64, 128, 4, 4),
        MANY: Tiles(128, 128, 128, 8, 3),
    },
    "fp8": {
        16: Tiles(64, 16, 256, 4, 4),
        32: Tiles(64, 32, 256, 4, 4),
        64: Tiles(64, 64, 128, 4, 4),
        # Sums that go to float32 every tile are held twice, for which 256 rows leave no registers
        MANY: Tiles(128, 128, 128, 8, 4),
    },
    # Inputs: a group, whatever stands here; so more tiles are in flight. Many outputs and few rows: a thread holds the
    # scales of its rows, and of a line or two
    "block_fp8": {
        16: Tiles(64, 16, 128, 4, 7),
        32: Tiles(64, 32, 128, 4, 7),
        64: Tiles(64, 64, 128, 4, 5),
        MANY: Tiles(256, 64, 128, 8, 4),
    },
    "int8": {
        16: Tiles(64, 16, 256, 4, 4),
        32: Tiles(64, 32, 256, 4, 4),
        64: Tiles(64, 64, 128, 4, 4),
        256: Tiles(128, 128, 128, 8, 4),
        MANY: Tiles(128, 256, 128, 8, 3),
    },
}
# Bytes of a value of the weight, and of x, in a tile
_ITEM_BYTES: dict[Kind, tuple[float, int]] = {
    "half": (2, 2),
    "wide": (4, 4),
    "coded": (1, 2),
    "fp8": (1, 1),
    "block_fp8": (1, 1),
    "int8": (1, 1),
}
# One for any number of rows: the same instructions in the same order. 128 rows cost nothing where the weight has to be
# read anyway (H100: 256 operations a value of 2 bytes take 0.26 ps at the peak, its reading 0.6 ps), and are few enough
# for a tile to be used well when there are many.
_DETERMINISTIC: dict[Kind, Tiles] = {
    "half": Tiles(128, 128, 64, 8, 3),
    "wide": Tiles(64, 64, 16, 4, 3),
    "coded": Tiles(128, 128, 128, 8, 3),
    "fp8": Tiles(128, 128, 128, 8, 3),
    "block_fp8": Tiles(256, 64, 128, 8, 3),
}


def choose_cut(
    kind: Kind,
    outputs: int,
    rows: int,
    inputs: int,
    deterministic: bool,
    processors: int,
    span: int | None = None,
    aligned: bool = True,
) -> Cut:
    """`deterministic`: what is summed with what depends on outputs, inputs and `aligned` alone. All sizes ≥ 1.

    `span`: inputs that a tile has to have, as their codes are packed together or share a scale. `aligned`: whether 16
    bytes are read at once.
    """
    if deterministic and kind != "int8":  # sums of integers are exact however they are cut
        tiles = _fitted(kind, _narrow(kind, _DETERMINISTIC[kind], True), span, aligned)
        return _deterministic_cut(tiles, outputs, rows, inputs)
    found = _by_rows(kind, outputs, rows, processors)
    tiles = _fitted(kind, _narrow(kind, found, False), span, aligned)
    programs = cdiv(outputs, tiles.outputs) * cdiv(rows, tiles.rows)
    wanted = PROGRAMS_PER_PROCESSOR * processors // programs
    segment = _segment(inputs, wanted, tiles)
    return Cut(tiles, segment, cdiv(inputs, segment), cdiv(inputs, segment))


def grouped_tiles(
    kind: Kind,
    outputs: int,
    rows: int,
    groups: int,
    deterministic: bool,
    processors: int,
    aligned: bool,
    span: int | None = None,
) -> Tiles:
    """Tiles of a product whose rows are spread over so many weights, as if evenly. Their sums are not split: many
    weights make many tiles. `deterministic`, `span`: as for choose_cut."""
    if deterministic and kind != "int8":
        return _fitted(kind, _narrow(kind, _DETERMINISTIC[kind], True), span, aligned)
    each = max(1, cdiv(rows, groups))
    found = _by_rows(kind, outputs * groups, each, processors)
    return _fitted(kind, _narrow(kind, found, False), span, aligned)


def _deterministic_cut(tiles: Tiles, outputs: int, rows: int, inputs: int) -> Cut:
    """Few rows run a segment a program, many rows one after the other: the sums are the same."""
    wanted = DETERMINISTIC_PROGRAMS // cdiv(outputs, tiles.outputs)
    segment = _segment(inputs, wanted, tiles)
    segments = cdiv(inputs, segment)
    return Cut(tiles, segment, segments if rows <= tiles.rows else 1, segments)


def _by_rows(kind: Kind, outputs: int, rows: int, processors: int) -> Tiles:
    """The widest tile for these rows that still gives every processor one; else the widest but one."""
    table = _TILES[kind]
    bounds = sorted(table)
    at = next(i for i, bound in enumerate(bounds) if rows <= bound)
    tiles = table[bounds[at]]
    if rows > tiles.rows and at > 0:
        programs = cdiv(outputs, tiles.outputs) * cdiv(rows, tiles.rows)
        return tiles if programs >= processors else table[bounds[at - 1]]
    return tiles


def _segment(inputs: int, wanted: int, tiles: Tiles) -> int:
    """Inputs of a segment, whole tiles, where about `wanted` segments are asked for."""
    count = max(1, min(wanted, inputs // LEAST_SEGMENT))
    return cdiv(cdiv(inputs, count), tiles.inputs) * tiles.inputs


def _narrow(kind: Kind, tiles: Tiles, deterministic: bool) -> Tiles:
    """Narrower where registers do not hold two tiles of sums.

    Packed codes: for compute capability 10.x Triton 3.7 makes of a tile of 128 outputs and 128 rows of int4 a kernel
    that does nothing. On 8.x and 12.x, where values that codes became stand in registers, two tiles of sums leave no
    room. Scales of blocks: on 10.x a thread has scales of as many rows as the tile has, on 9.0 of half of them.
    """
    found = architecture()
    if kind not in ("coded", "block_fp8") or not found.isdigit():
        return tiles
    hopper = int(found) // 10 == 9
    if kind == "block_fp8":
        return tiles if hopper else replace(tiles, outputs=min(tiles.outputs, 128))
    narrow = 100 <= int(found) < 120 or (deterministic and not hopper)
    return replace(tiles, rows=min(tiles.rows, 64)) if narrow else tiles


def _fitted(kind: Kind, tiles: Tiles, span: int | None, aligned: bool) -> Tiles:
    """Return tiles as the architecture allows them. AMD's compute units have 64 KiB of shared memory, where one tile is
    in flight."""
    if architecture().startswith("gfx"):
        sides = (min(tiles.outputs, 128), min(tiles.rows, 128), min(tiles.inputs, 64))
        tiles = Tiles(*sides, tiles.warps, 2)
    if not aligned:  # values that are read one by one have an address each, in registers
        few = kind == "block_fp8"  # of one group, more inputs than others are read at once
        sides = (min(tiles.outputs, 64), min(tiles.rows, 16 if few else 32), min(tiles.inputs, 32))
        tiles = Tiles(*sides, 8 if few else 4, 2)
    return _in_shared_memory(kind, tiles if span is None else replace(tiles, inputs=span))


def _in_shared_memory(kind: Kind, tiles: Tiles) -> Tiles:
    """Return tiles of which fewer are in flight on GPUs that have less shared memory. Sums do not change."""
    room = SMALL_MEMORY.get(architecture())
    if room is None:
        return tiles
    weight, x = _ITEM_BYTES[kind]
    tile = tiles.inputs * (tiles.outputs * weight + tiles.rows * x)
    return replace(tiles, stages=max(2, min(tiles.stages, int(room // tile))))
