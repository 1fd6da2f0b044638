"""The tiling of matrix products, by kind of operands and number of rows, and the splitting of sums.

The weight is the left factor: the first side of a tile are outputs, the second rows of x. Few rows then need only a
narrow tile, although tensor cores require at least 64 lines on the left, and packed weights are widened in the
registers that they are multiplied from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from batchinfer_kernels.gpu.sizes import cdiv
from batchinfer_kernels.gpu.target import SMALL_MEMORY, architecture

# half: both operands have 16 bits; wide: x is float32; coded: x has 16 bits and the weight is packed; fp8, int8: both
# are quantised; block_fp8: fp8 with scales of blocks
Kind = Literal["half", "wide", "coded", "fp8", "block_fp8", "int8"]
# Target number of programs of a deterministic product with few outputs: about the multiprocessors of a large GPU. It is
# fixed, because all GPUs of one architecture must give the same bits
DETERMINISTIC_PROGRAMS = 128
# The fewest inputs of a segment: each program waits for its first tiles, and its sums are written and read again
LEAST_SEGMENT = 512
# Target number of programs per multiprocessor if sums are split
PROGRAMS_PER_PROCESSOR = 2
MANY = 1 << 30


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tile of a matrix product that one program computes, and the launch options of its kernel.

    Attributes:
        outputs: number of outputs of a tile.
        rows: number of rows of x of a tile.
        inputs: number of inputs that are multiplied at a time.
        warps: number of warps of a program.
        stages: number of stages of the compiler's software pipeline.
    """

    outputs: int
    rows: int
    inputs: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class ProductSplit:
    """The tiles of a matrix product, and how its sums over inputs are split into segments.

    Attributes:
        tiles: the tile that a program computes.
        segment: number of inputs of a segment.
        splits: number of programs among which the inputs of a tile are divided; 1: one program computes all segments.
        segments: number of segments.
    """

    tiles: Tiles
    segment: int
    splits: int
    segments: int

    @property
    def in_turn(self) -> bool:
        """Return True if one program computes several segments and adds them up."""
        return self.segments > 1 and self.splits == 1


# By number of rows of x. Not measured: chosen to compile without spilling for compute capabilities 8.0, 9.0 and 10.0,
# to fit their shared memory, and in the range of published configurations (Triton's tutorials and vLLM's tables for
# H100 and A100: 16 to 256 rows, 64 to 256 outputs, 64 or 128 bytes of inputs, 3 to 5 stages). Up to 64 rows the product
# is bound by reading the weight, which needs narrow tiles and 64 to 128 KiB in flight per multiprocessor
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
    "coded": {  # the number of inputs is replaced by the span
        16: Tiles(128, 16, 128, 4, 5),
        32: Tiles(128, 32, 128, 4, 4),
        64: Tiles(64, 64, 128, 4, 4),
        MANY: Tiles(128, 128, 128, 8, 3),
    },
    "fp8": {
        16: Tiles(64, 16, 256, 4, 4),
        32: Tiles(64, 32, 256, 4, 4),
        64: Tiles(64, 64, 128, 4, 4),
        # Sums that are moved to float32 every tile are held twice, and 256 rows would exceed the registers
        MANY: Tiles(128, 128, 128, 8, 4),
    },
    # The number of inputs is replaced by the group, which is small, hence more stages. Many outputs and few rows: a
    # thread holds the scales of its rows, and of one or two lines
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
# Bytes per value in a tile, of the weight and of x
_ITEM_BYTES: dict[Kind, tuple[float, int]] = {
    "half": (2, 2),
    "wide": (4, 4),
    "coded": (1, 2),
    "fp8": (1, 1),
    "block_fp8": (1, 1),
    "int8": (1, 1),
}
# One tile for any number of rows: the same instructions in the same order. If few rows make the weight's bandwidth the
# limit, 128 rows cost nothing (H100: 256 operations per 16-bit value take 0.26 ps at the peak, reading it 0.6 ps); if
# there are many rows, 128 use a tile well
_DETERMINISTIC: dict[Kind, Tiles] = {
    "half": Tiles(128, 128, 64, 8, 3),
    "wide": Tiles(64, 64, 16, 4, 3),
    "coded": Tiles(128, 128, 128, 8, 3),
    "fp8": Tiles(128, 128, 128, 8, 3),
    "block_fp8": Tiles(256, 64, 128, 8, 3),
}


def choose_split(
    kind: Kind,
    outputs: int,
    rows: int,
    inputs: int,
    deterministic: bool,
    processors: int,
    span: int | None = None,
    aligned: bool = True,
) -> ProductSplit:
    """Return the tiles and the split of a product for this GPU. All sizes must be at least 1.

    Args:
        kind: kind of operands, such as "half" or "int8".
        outputs: number of outputs of the weight.
        rows: number of rows of x.
        inputs: number of inputs of the weight.
        deterministic: True if the order of sums must depend only on outputs, inputs and `aligned`.
        processors: number of multiprocessors of the GPU.
        span: required number of inputs per tile, if weights are packed or scaled in units of it; None: any number.
        aligned: True if the rows of x and of the weight are aligned to 16 bytes.
    """
    if deterministic and kind != "int8":  # integer sums are exact in any order
        tiles = _fitted(kind, _narrow(kind, _DETERMINISTIC[kind], True), span, aligned)
        return _deterministic_split(tiles, outputs, rows, inputs)
    found = _by_rows(kind, outputs, rows, processors)
    tiles = _fitted(kind, _narrow(kind, found, False), span, aligned)
    programs = cdiv(outputs, tiles.outputs) * cdiv(rows, tiles.rows)
    wanted = PROGRAMS_PER_PROCESSOR * processors // programs
    segment = _segment(inputs, wanted, tiles)
    return ProductSplit(tiles, segment, cdiv(inputs, segment), cdiv(inputs, segment))


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
    """Return the tiles of a product whose rows are spread evenly over several weights, such as experts.

    Sums over inputs are not split, because many weights already make many tiles.

    Args:
        kind: kind of operands, such as "half" or "int8".
        outputs: number of outputs of a weight.
        rows: number of rows of x.
        groups: number of weights.
        deterministic: True if the tiles must not depend on the number of rows.
        processors: number of multiprocessors of the GPU.
        aligned: True if the rows of x and of the weights are aligned to 16 bytes.
        span: required number of inputs per tile, if weights are packed or scaled in units of it; None: any number.
    """
    if deterministic and kind != "int8":
        return _fitted(kind, _narrow(kind, _DETERMINISTIC[kind], True), span, aligned)
    each = max(1, cdiv(rows, groups))
    found = _by_rows(kind, outputs * groups, each, processors)
    return _fitted(kind, _narrow(kind, found, False), span, aligned)


def _deterministic_split(tiles: Tiles, outputs: int, rows: int, inputs: int) -> ProductSplit:
    # With few rows, each segment is a program; with many rows, one program computes all segments in turn
    wanted = DETERMINISTIC_PROGRAMS // cdiv(outputs, tiles.outputs)
    segment = _segment(inputs, wanted, tiles)
    segments = cdiv(inputs, segment)
    return ProductSplit(tiles, segment, segments if rows <= tiles.rows else 1, segments)


def _by_rows(kind: Kind, outputs: int, rows: int, processors: int) -> Tiles:
    # The widest tile must occupy every multiprocessor, else the next narrower one is used
    table = _TILES[kind]
    bounds = sorted(table)
    at = next(i for i, bound in enumerate(bounds) if rows <= bound)
    tiles = table[bounds[at]]
    if rows > tiles.rows and at > 0:
        programs = cdiv(outputs, tiles.outputs) * cdiv(rows, tiles.rows)
        return tiles if programs >= processors else table[bounds[at - 1]]
    return tiles


def _segment(inputs: int, wanted: int, tiles: Tiles) -> int:
    count = max(1, min(wanted, inputs // LEAST_SEGMENT))
    return cdiv(cdiv(inputs, count), tiles.inputs) * tiles.inputs


def _narrow(kind: Kind, tiles: Tiles, deterministic: bool) -> Tiles:
    # The tile is narrowed if registers do not hold it. Packed weights: for compute capability 10.x, Triton 3.7 compiles
    # a tile of 128 outputs and 128 rows of int4 to a kernel that does nothing. On 8.x and 12.x widened values are in
    # registers, and two tiles of sums do not fit. Block scales: on 10.x a thread holds the scales of all rows of the
    # tile, on 9.0 of half of them
    found = architecture()
    if kind not in ("coded", "block_fp8") or not found.isdigit():
        return tiles
    hopper = int(found) // 10 == 9
    if kind == "block_fp8":
        return tiles if hopper else replace(tiles, outputs=min(tiles.outputs, 128))
    narrow = 100 <= int(found) < 120 or (deterministic and not hopper)
    return replace(tiles, rows=min(tiles.rows, 64)) if narrow else tiles


def _fitted(kind: Kind, tiles: Tiles, span: int | None, aligned: bool) -> Tiles:
    if architecture().startswith("gfx"):
        sides = (min(tiles.outputs, 128), min(tiles.rows, 128), min(tiles.inputs, 64))
        tiles = Tiles(*sides, tiles.warps, 2)
    if not aligned:  # values are loaded one by one, and each address takes a register
        few = kind == "block_fp8"  # its tiles have the inputs of a whole group
        sides = (min(tiles.outputs, 64), min(tiles.rows, 16 if few else 32), min(tiles.inputs, 32))
        tiles = Tiles(*sides, 8 if few else 4, 2)
    return _in_shared_memory(kind, tiles if span is None else replace(tiles, inputs=span))


def _in_shared_memory(kind: Kind, tiles: Tiles) -> Tiles:
    # Fewer pipeline stages on GPUs with less shared memory; sums do not change
    room = SMALL_MEMORY.get(architecture())
    if room is None:
        return tiles
    weight, x = _ITEM_BYTES[kind]
    tile = tiles.inputs * (tiles.outputs * weight + tiles.rows * x)
    return replace(tiles, stages=max(2, min(tiles.stages, int(room // tile))))
