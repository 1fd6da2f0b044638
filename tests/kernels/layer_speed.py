"""What each operator of a decoder layer takes among the others, beside its bound: layers of random weights, one after
the other, in turns with those of other sources.

    python -m tests.kernels.layer_speed [--against FOLDER] [--model 135m|1b] [--rows 16 128 ...] [--int8]
        [--dtype bfloat16|float32] [--one-core]

Rows decode with contexts of 96 tokens, or are those of one prompt from 512 on. Microseconds a layer, the lower quartile
of many rounds: what passed, its ratio to the bound (FLOPs and bytes by the peaks that are reached here), and in
brackets what the threads worked of it, waiting for one another left out. On a busy machine `--one-core` counts the CPU
time of a single thread. Last comes how many times as long a layer takes with these operators as with those of each
other folder, the median of all rounds, and of each operator.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from batchinfer.models.ops import peaks
from batchinfer_kernels.cost import (
    Cost,
    Peaks,
    attention_cost,
    linear_cost,
    quantized_linear_cost,
    rms_norm_cost,
    rope_store_cost,
)
from batchinfer_kernels.cpu import build
from batchinfer_kernels.cpu.attention_plan import attention_items
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.cpu.layer import (
    PRE_NORMS,
    LayerRoom,
    LayerRotation,
    LayerSizes,
    LayerWeights,
    PackedLayer,
    StepPlaces,
)
from batchinfer_kernels.cpu.memory import zeros_in_huge_pages
from batchinfer_kernels.cpu.packed import Kind, PackedWeight
from batchinfer_kernels.quantized_linear import quantize_weight

HERE = Path(__file__).parent
OPERATORS = (
    "between",
    "input_norm",
    "codes",
    "qkv",
    "rope_store",
    "attention",
    "o",
    "post_norm",
    "gate_up",
    "down",
)
CONTEXT, PROMPT, BLOCK = 96, 512, 16  # tokens; a step of so many rows is one prompt's
LEAST_ROUNDS = 5


@dataclass(frozen=True)
class Model:
    """The sizes of layers, of which there are enough to fill no cache."""

    layers: int
    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    int8: bool = False

    @property
    def sizes(self) -> LayerSizes:
        return LayerSizes(self.q_heads, self.kv_heads, self.dim, self.dim**-0.5, 1e-5)

    def bounds(self, rows: int) -> dict[str, Cost]:
        size, heads = self.dtype.itemsize, (self.q_heads, self.kv_heads, self.dim)
        norm = rms_norm_cost(rows, self.hidden, size, residual=True)
        pairs, tokens = (rows * (rows + 1) // 2, rows) if rows >= PROMPT else (rows * CONTEXT,) * 2
        attended = self.q_heads * self.dim
        return {
            "input_norm": norm,
            "post_norm": norm,
            "rope_store": rope_store_cost(rows, *heads, size),
            "codes": Cost(0, (size + 1) * rows * (2 * self.hidden + attended + self.inner)),
            "qkv": self._product(rows, self.hidden, (self.q_heads + 2 * self.kv_heads) * self.dim),
            "o": self._product(rows, attended, self.hidden),
            "gate_up": self._product(rows, self.hidden, 2 * self.inner),
            "down": self._product(rows, self.inner, self.hidden),
            "attention": attention_cost(rows, pairs, tokens, *heads, size),
        }

    def _product(self, rows: int, inputs: int, outputs: int) -> Cost:
        size = self.dtype.itemsize
        if self.int8:
            return quantized_linear_cost(rows, inputs, outputs, size)
        return linear_cost(rows, inputs, outputs, size, size)


MODELS = {"135m": Model(30, 576, 1536, 9, 3), "1b": Model(4, 2048, 8192, 32, 8)}


class Timed:
    """The operators of a folder, their clock, and layers of them."""

    def __init__(self, folder: Path, cache: Path, model: Model, one_core: bool) -> None:
        with clocked(folder, one_core):
            self.compiled = CompiledOperators(cache)
            self._library = ctypes.CDLL(str(build.library_path(cache)))
        self.model = model
        self._layers = [self._layer() for _ in range(model.layers)]

    def _layer(self) -> PackedLayer:
        m, angles = (
            self.model,
            torch.outer(torch.arange(4096.0), 1e4 ** -torch.linspace(0, 1, self.model.dim // 2)),
        )
        heads = (m.q_heads + 2 * m.kv_heads) * m.dim
        weights = LayerWeights(
            {name: torch.ones(m.hidden, dtype=m.dtype) for name in PRE_NORMS},
            LayerRotation(angles.cos(), angles.sin()),
            self._packed(heads, m.hidden),
            self._packed(m.hidden, m.q_heads * m.dim),
            self._packed(2 * m.inner, m.hidden, "gated"),
            self._packed(m.hidden, m.inner),
            None,
        )
        return PackedLayer(weights, m.sizes)

    def _packed(self, outputs: int, inputs: int, kind: Kind = "plain") -> PackedWeight:
        weight = (torch.randn(outputs, inputs) * inputs**-0.5).to(self.model.dtype)
        if self.model.int8:
            return self.compiled.pack_codes(*quantize_weight(weight), None, kind)
        return self.compiled.pack_linear(weight, None, kind)

    def step(self, rows: int) -> Step:
        return Step(self, self._layers, rows)

    def read(self, threads: int) -> list[dict[str, tuple[float, float]]]:
        """Of each thread, by operator: seconds that passed, and of them waiting."""
        found = []
        for thread in range(threads):
            passed, waited = ((ctypes.c_double * len(OPERATORS))() for _ in range(2))
            self._library.read_clock(ctypes.c_int64(thread), passed, waited)
            found.append(dict(zip(OPERATORS, zip(passed, waited, strict=True), strict=True)))
        return found


class Step:
    """A step of some rows through all layers, each with a cache of its own."""

    def __init__(self, timed: Timed, layers: Sequence[PackedLayer], rows: int) -> None:
        m, self._compiled, self._layers = timed.model, timed.compiled, layers
        lens, contexts = ([rows], [rows]) if rows >= PROMPT else ([1] * rows, [CONTEXT] * rows)
        blocks = -(-contexts[0] // BLOCK)
        order = torch.randperm(len(lens) * blocks, generator=torch.Generator().manual_seed(1)).int()
        tables = order.view(len(lens), blocks)
        first = contexts[0] - lens[0]
        positions = torch.arange(first, contexts[0]).repeat(len(lens))
        slots = (
            (tables[:, positions[: lens[0]] // BLOCK] * BLOCK + positions[: lens[0]] % BLOCK).flatten().long()
        )
        most = self._compiled.most_rows
        items = attention_items(lens, contexts, m.q_heads // m.kv_heads, most_rows=most)
        shape = self._compiled.cache_shape(m.kv_heads, BLOCK, m.dim)
        self._caches = [zeros_in_huge_pages((2, len(order), *shape), m.dtype) for _ in layers]
        self._x = torch.randn(rows, m.hidden).to(m.dtype)
        places = StepPlaces(positions, slots, tables, items, BLOCK)
        self._room = LayerRoom(self._x, layers[0], places, shape, None)

    def run(self) -> None:
        self._room.x.copy_(self._x)
        self._room.residual.copy_(self._x)
        for layer, cache in zip(self._layers, self._caches, strict=True):
            self._compiled.decoder_layer(layer, self._room, cache[0], cache[1], False)

    @property
    def results(self) -> tuple[Tensor, Tensor]:
        return self._room.x, self._room.residual


@contextmanager
def clocked(folder: Path, one_core: bool) -> Iterator[None]:
    """While it lasts, operators are built from that folder, and with a clock."""
    before = build.FLAGS, build.FOLDER, build.SOURCES
    clock = ("-include", str(HERE / "layer_clock.h"), "-Wl,--wrap=GOMP_barrier")
    counted = ("-DCLOCK=CLOCK_THREAD_CPUTIME_ID",) if one_core else ()
    build.FLAGS, build.FOLDER = (*build.FLAGS, *clock, *counted), folder
    build.SOURCES = tuple(folder / source.name for source in build.SOURCES)
    try:
        yield
    finally:
        build.FLAGS, build.FOLDER, build.SOURCES = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, nargs="*", default=[])
    parser.add_argument("--model", choices=MODELS, default="135m")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, 64, 128, 512, 1024, 2048])
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--one-core", action="store_true")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each number of rows and each folder")
    options = parser.parse_args()
    model = replace(MODELS[options.model], dtype=getattr(torch, options.dtype), int8=options.int8)
    if options.one_core:
        torch.set_num_threads(1)
        peaks._timed = _cpu_timed
    found = peaks.measure_peaks("cpu", (options.dtype, "int8"))
    bounds = Peaks(found.peak_flops[options.dtype], found.bandwidth, found.peak_flops["int8"])
    rates = {
        name: {who: f"{rate / 1e9:.0f} G/s" for who, rate in of.items()} for name, of in found.rates.items()
    }
    print(f"{found.bandwidth / 1e9:.1f} GB/s, {rates}")
    with tempfile.TemporaryDirectory() as cache:
        folders = [build.FOLDER, *(folder.resolve() for folder in options.against)]
        timed = []
        for folder in folders:
            torch.manual_seed(0)
            timed.append(Timed(folder, Path(cache), model, options.one_core))
        for rows in options.rows:
            _compare(timed, rows, bounds, options.seconds)


def _cpu_timed(call: Callable[[], object], _where: torch.device) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


def _compare(timed: list[Timed], rows: int, reached: Peaks, seconds: float) -> None:
    steps = []
    for one in timed:
        torch.manual_seed(rows)
        steps.append(one.step(rows))
    rounds: list[list[list[dict[str, tuple[float, float]]]]] = [[] for _ in timed]
    end = time.perf_counter() + seconds * len(timed)
    for step in steps:
        step.run()
    apart = [_apart(step.results[0], steps[0].results[0]) for step in steps]
    while time.perf_counter() < end or len(rounds[0]) < LEAST_ROUNDS:
        for one, step, found in zip(timed, steps, rounds, strict=True):
            one.read(torch.get_num_threads())
            step.run()
            found.append(one.read(torch.get_num_threads()))
    for one, found in zip(timed, rounds, strict=True):
        del found[: len(found) // 10]
        print(_line(one.model, rows, found, reached), flush=True)
    for other in rounds[1:]:
        print(f"{rows:5} first / other: {_ratios(rounds[0], other)}", flush=True)
    if any(apart):
        print(f"the results differ: {' / '.join(filter(None, apart))}")


def _apart(found: Tensor, first: Tensor) -> str:
    """Say in which rows results differ from the first operators', and by how much at most."""
    differing = (found != first).any(1).nonzero().flatten().tolist()
    return f"rows {differing} by up to {(found - first).abs().max():.3g}" if differing else ""


def _quartile(values: Iterable[float]) -> float:
    """The lower one: what others do on the machine only lengthens."""
    return statistics.quantiles(values, n=4)[0]


def _ratios(
    first: list[list[dict[str, tuple[float, float]]]], other: list[list[dict[str, tuple[float, float]]]]
) -> str:
    pairs = [(a[0], b[0]) for a, b in zip(first, other, strict=True)]
    whole = statistics.median(
        sum(a[name][0] for name in OPERATORS[1:]) / sum(b[name][0] for name in OPERATORS[1:])
        for a, b in pairs
    )
    each = {
        name: statistics.median(a[name][0] / b[name][0] for a, b in pairs)
        for name in OPERATORS[1:]
        if all(b[name][0] for _, b in pairs)
    }
    return f"{whole:.3f} of {len(pairs)} rounds; " + " ".join(f"{n} {ratio:.3f}" for n, ratio in each.items())


def _line(model: Model, rows: int, found: list[list[dict[str, tuple[float, float]]]], reached: Peaks) -> str:
    bounds, parts = model.bounds(rows), []

    def took(name: str) -> float:
        return _quartile(each[0][name][0] for each in found) / model.layers * 1e6

    def worked(name: str) -> float:
        return (
            max(
                _quartile(each[i][name][0] - each[i][name][1] for each in found) for i in range(len(found[0]))
            )
            / model.layers
            * 1e6
        )

    for name in OPERATORS[1:]:
        if took(name) > 0:
            bound = bounds[name].seconds(reached) * 1e6
            parts.append(f"{name} {took(name):7.2f} {took(name) / bound:5.2f} ({worked(name):7.2f})")
    run = [name for name in OPERATORS[1:] if took(name) > 0]
    whole, least = sum(map(took, run)), sum(bounds[name].seconds(reached) for name in run) * 1e6
    return f"{rows:5} whole {whole:8.1f} {whole / least:5.2f}: {'  '.join(parts)}"


if __name__ == "__main__":
    main()
