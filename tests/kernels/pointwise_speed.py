"""How long the operators take that move data and compute little, beside plain loops that move as many bytes in as many
streams: in turns, the best of many rounds of each, with the call and the start of the threads taken off.

    python -m tests.kernels.pointwise_speed [--against FOLDER] [--threads N]

`--against` times the C operators of another folder, which has to have bfloat16.h, in turns with these. bfloat16;
microseconds a call.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchinfer_kernels.cpu import build
from batchinfer_kernels.cpu.packed import KINDS, codes_room
from batchinfer_kernels.cpu.structures import Heads, RotationStructure
from tests.kernels.c_units import HERE, compiler

ROWS, WIDTHS = (32, 128, 1024), (576, 2048, 4096)
HEADS = {576: (9, 3, 64), 2048: (32, 8, 64), 4096: (32, 8, 128)}
BLOCK, ROUNDS, ROUND_S = 16, 15, 0.002
Arguments = Callable[[int], tuple[Any, ...]]  # of so many rows


@dataclass(frozen=True)
class Timed:
    """An operator at a size: `moved` bytes in `streams` that are read and written."""

    name: str
    rows: int
    moved: int
    streams: tuple[int, int]
    function: str
    arguments: Arguments


def norm(rows: int, width: int, residual: bool) -> Timed:
    x, other, y, total = (torch.randn(rows, width).bfloat16() for _ in range(4))
    weight = torch.ones(width).bfloat16()
    kept = other if residual else None

    def arguments(count: int) -> tuple[Any, ...]:
        return x, kept, weight, y, total, count, width, 1e-6, 0.0

    streams = (2, 2) if residual else (1, 1)
    name = f"norm{' and residual' * residual} {width}"
    return Timed(name, rows, sum(streams) * rows * width * 2, streams, "rms_norm_bf16", arguments)


def gate(rows: int, width: int) -> Timed:
    x, y = torch.randn(rows, 2 * width).bfloat16(), torch.empty(rows, width).bfloat16()

    def arguments(count: int) -> tuple[Any, ...]:
        return x, y, count, width, KINDS["gated"]

    return Timed(f"gate {width}", rows, 3 * rows * width * 2, (2, 1), "gate_bf16", arguments)


def quantize(rows: int, width: int) -> Timed:
    x, codes = torch.randn(rows, width).bfloat16(), codes_room(rows, width)
    scales = torch.empty(rows)

    def arguments(count: int) -> tuple[Any, ...]:
        return x, width, codes, scales, count

    return Timed(f"quantize {width}", rows, 3 * rows * width, (2, 1), "quantize", arguments)


def rotation(
    rows: int, width: int, prefill: bool, *, normed: bool = False, interleaved: bool = False
) -> Timed:
    """Of consecutive places, or of a place in a block of its own for each row. `moved` counts whole lines of K."""
    q_heads, kv_heads, dim = HEADS[width]
    heads = q_heads + 2 * kv_heads
    x, out = torch.randn(rows, heads * dim).bfloat16(), torch.empty(rows, q_heads * dim).bfloat16()
    caches = torch.zeros(2, rows + 1, kv_heads, BLOCK, dim).bfloat16()
    table, weight = torch.randn(2, 4096, dim // 2), torch.ones(dim).bfloat16()
    at = torch.arange(rows)
    positions, slots = (at, at) if prefill else (at * 3 + 700, at * BLOCK + at % BLOCK)
    norms = [weight.data_ptr()] * 2 if normed else [None, None]
    kept = (x, out, caches, table, weight, positions, slots)

    def arguments(count: int) -> tuple[Any, ...]:
        first = [kept[0].data_ptr() + n * dim * 2 for n in (0, q_heads, q_heads + kv_heads)]
        places = [positions.data_ptr(), slots.data_ptr(), *(c.data_ptr() for c in caches), out.data_ptr()]
        rules = RotationStructure(
            table[0].data_ptr(), table[1].data_ptr(), dim // 2, interleaved, *norms, 1e-6, 0
        )
        sizes = (count, q_heads, kv_heads, dim, dim, BLOCK, BLOCK)
        return (ctypes.pointer(Heads(*first, heads * dim, *places, rules, *sizes)),)

    values = rows * heads * dim * 2
    scattered = 0 if prefill else rows * kv_heads * dim * 2 * 15  # a line for each word of K
    kind = "prefill" if prefill else "decode"
    name = f"rotation {kind}{' normed' * normed}{' interleaved' * interleaved} {width}"
    return Timed(name, rows, 2 * values + 2 * scattered, (1, 1), "rope_store_bf16", arguments)


def cases() -> Iterator[Timed]:
    for width in WIDTHS:
        for rows in ROWS:
            yield from (
                norm(rows, width, False),
                norm(rows, width, True),
                gate(rows, width),
                quantize(rows, width),
            )
            yield from (rotation(rows, width, False), rotation(rows, width, True))
    for width in WIDTHS:
        yield rotation(128, width, True, normed=True)
        yield rotation(128, width, True, interleaved=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="operators whose name starts so")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        libraries = [_built(build.FOLDER, Path(folder) / "here.so")]
        if options.against:
            libraries.append(_built(options.against, Path(folder) / "there.so"))
        for case in cases():
            if case.name.startswith(options.only):
                print(_line(case, libraries), flush=True)


def _built(headers: Path, library: Path) -> ctypes.CDLL:
    command = [compiler(), *build.FLAGS, "-I", str(headers), str(HERE / "pointwise_probe.c"), "-shared"]
    subprocess.run([*command, "-o", str(library), "-lm"], check=True)
    return ctypes.CDLL(str(library))


def _line(case: Timed, libraries: list[ctypes.CDLL]) -> str:
    vectors = case.moved // sum(case.streams) // 64
    source, target = (torch.zeros(vectors * 16 * n) for n in case.streams)
    runs = [_bound(libraries[0].move, source, target, count, *case.streams) for count in (vectors, 0)]
    for library in libraries:
        runs += [_bound(library[case.function], *case.arguments(count)) for count in (case.rows, 0)]
    best = _best(runs)
    moved, *took = (best[i] - best[i + 1] for i in range(0, len(best), 2))
    found = " ".join(f"{1e6 * t:9.2f} {t / moved:5.2f}" for t in took)
    return f"{case.name:32} {case.rows:5} {1e6 * moved:9.2f} {case.moved / moved / 1e9:6.1f} GB/s {found}"


def _best(runs: list[Callable[[], None]]) -> list[float]:
    """Seconds a call of each, in turns."""
    counts = []
    for run in runs:
        run()
        start = time.perf_counter()
        run()
        counts.append(max(3, int(ROUND_S / (time.perf_counter() - start + 1e-7))))
    best = [float("inf")] * len(runs)
    gc.collect()
    gc.disable()
    for _ in range(ROUNDS):
        for i, run in enumerate(runs):
            run()  # what the others moved is in the caches
            start = time.perf_counter()
            for _ in range(counts[i]):
                run()
            best[i] = min(best[i], (time.perf_counter() - start) / counts[i])
    gc.enable()
    return best


def _bound(function: Any, *arguments: Any) -> Callable[[], None]:
    """A call whose arguments were converted once."""
    function.restype = None
    return partial(function, *(_converted(argument) for argument in arguments))


def _converted(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return ctypes.c_int64(argument) if isinstance(argument, int) else argument


if __name__ == "__main__":
    main()
