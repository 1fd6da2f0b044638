"""Single tile instructions of tile_probe.c on arrays. Imports little, for processes that must crash."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

SHAPES = np.dtype(
    [("palette", "u1"), ("start", "u1"), ("reserved", "u1", 14), ("bytes", "u2", 16), ("rows", "u1", 16)]
)
SUM, X, WEIGHT = 0, 1, 2


def shapes_of(rows: int, words: int, columns: int) -> np.ndarray:
    """Return the tile shapes of a product."""
    shapes = np.zeros((), SHAPES)
    shapes["palette"] = 1
    for tile, (height, width) in {SUM: (rows, columns), X: (rows, words), WEIGHT: (words, columns)}.items():
        shapes["rows"][tile], shapes["bytes"][tile] = height, 4 * width
    return shapes


def multiply(probe: ctypes.CDLL, x, weight, total, codes: bool = False, shapes: np.ndarray | None = None):
    """Return total + x weight of arrays of words: (rows, words), (words, columns), (rows, columns)."""
    made = total.copy()
    shapes = shapes_of(*x.shape, weight.shape[1]) if shapes is None else shapes
    places = [
        part for array in (x, weight, made) for part in (address(array), ctypes.c_int64(array.strides[0]))
    ]
    probe.add_product(address(shapes), *places, ctypes.c_int64(codes))
    return made


def address(array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def at_the_end_of_memory(rows: int, stride: int):
    """Return (rows, stride / 4) words that end at the end of readable memory."""
    return guarded(rows * stride).view(np.uint32).reshape(rows, stride // 4)


def guarded(size: int):
    """Return `size` zero bytes at the end of readable memory."""
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
    whole = -(-size // page) * page
    memory = mmap.mmap(-1, whole + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(start + whole), ctypes.c_size_t(page), 0) == 0
    return np.frombuffer(memory, np.uint8, size, whole - size)
