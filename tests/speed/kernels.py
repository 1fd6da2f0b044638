"""The time of each operator in a decoder layer, compared with its bound and with other sources."""

from __future__ import annotations

import ctypes
import statistics
import time
from argparse import Namespace
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
from tests.speed.harness import option, section, switch

HERE = Path(__file__).parent
OPERATORS = (
    "between", "input_norm", "codes", "qkv", "rope_store", "attention", "o", "post_norm", "gate_up", "down",
)  # fmt: skip
CONTEXT, PROMPT, BLOCK = 96, 512, 16  # tokens; a step of so many rows is one prompt's
LEAST_ROUNDS = 5
Clocks = list[
    dict[str, tuple[float, float]]
]  # of each thread, by operator: seconds that passed, and of them waiting


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

    def read(self, threads: int) -> Clocks:
        """Return the clocks since they were read before."""
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


@section(
    "layer",
    option("--against", type=Path, nargs="*", help="folders of other sources"),
    option("--model", choices=MODELS, default="135m"),
    option("--rows", default=(16, 32, 64, 128, 512, 1024, 2048)),
    switch("--int8", "products of codes"),
    option("--dtype", choices=("bfloat16", "float32"), default="bfloat16"),
    switch("--one-core", "count the CPU time of a single thread, as on a busy machine"),
    option("--seconds", default=4.0, help="of each number of rows and each folder"),
)
def layer(given: Namespace, place: Path) -> list[dict[str, object]]:
    """Time each operator in a decoder layer, and compare it with its bound.

    Layers of random weights run in sequence, in turns with layers of other sources. Rows decode with contexts of 96
    tokens; from 512 rows on, they are one prompt. Microseconds a layer, the lower quartile of many rounds: the time
    that passed, its ratio to the bound (FLOPs and bytes by the peaks that are reached here), and in brackets that of
    the thread that waited the least for others. Then comes how many times as long a layer takes with these operators as
    with each other folder's, the median of all rounds, and the same for each operator.
    """
    model = replace(MODELS[given.model], dtype=getattr(torch, given.dtype), int8=given.int8)
    if given.one_core:
        torch.set_num_threads(1)
        peaks._timed = _cpu_timed
    found = peaks.measure_peaks("cpu", (given.dtype, "int8"))
    bounds = Peaks(found.peak_flops[given.dtype], found.bandwidth, found.peak_flops["int8"])
    print(f"{found.bandwidth / 1e9:.1f} GB/s, {found.rates}")
    timed = []
    for folder in (build.FOLDER, *(folder.resolve() for folder in given.against or [])):
        torch.manual_seed(0)
        timed.append(Timed(folder, place, model, given.one_core))
    return [_compare(timed, rows, bounds, given.seconds) for rows in given.rows]


def _cpu_timed(call: Callable[[], object], where: torch.device) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


def _compare(timed: list[Timed], rows: int, reached: Peaks, seconds: float) -> dict[str, object]:
    steps = []
    for one in timed:
        torch.manual_seed(rows)
        steps.append(one.step(rows))
    rounds: list[list[Clocks]] = [[] for _ in timed]
    end = time.perf_counter() + seconds * len(timed)
    for step in steps:
        step.run()
    apart = [_apart(step.results[0], steps[0].results[0]) for step in steps]
    while time.perf_counter() < end or len(rounds[0]) < LEAST_ROUNDS:
        for one, step, found in zip(timed, steps, rounds, strict=True):
            one.read(torch.get_num_threads())
            step.run()
            found.append(one.read(torch.get_num_threads()))
    for found in rounds:
        del found[: len(found) // 10]
    times = [_times(timed[0].model, rows, found, reached) for found in rounds]
    for each in times:
        text = "  ".join(
            f"{name} {t:7.2f} {share:5.2f} ({own:7.2f})" for name, (t, share, own) in each.items()
        )
        print(f"{rows:5} {text}", flush=True)
    others = [_ratios(rounds[0], other) for other in rounds[1:]]
    for other in others:
        text = " ".join(f"{name} {ratio:.3f}" for name, ratio in other.items())
        print(f"{rows:5} first / other, {len(rounds[0])} rounds: {text}", flush=True)
    if any(apart):
        print(f"the results differ: {' / '.join(filter(None, apart))}")
    return {"rows": rows, "times": times, "ratios": others}


def _apart(found: Tensor, first: Tensor) -> str:
    """Say in which rows results differ from the first operators', and by how much at most."""
    differing = (found != first).any(1).nonzero().flatten().tolist()
    return f"rows {differing} by up to {(found - first).abs().max():.3g}" if differing else ""


def _quartile(values: Iterable[float]) -> float:
    """The lower one: what others do on the machine only lengthens."""
    return statistics.quantiles(values, n=4)[0]


def _ratios(first: list[Clocks], other: list[Clocks]) -> dict[str, float]:
    pairs = [(a[0], b[0]) for a, b in zip(first, other, strict=True)]
    run = [name for name in OPERATORS[1:] if all(b[name][0] for _, b in pairs)]

    def ratio(names: Sequence[str]) -> float:
        return statistics.median(sum(a[n][0] for n in names) / sum(b[n][0] for n in names) for a, b in pairs)

    return {"whole": ratio(OPERATORS[1:]), **{name: ratio([name]) for name in run}}


def _times(
    model: Model, rows: int, found: list[Clocks], reached: Peaks
) -> dict[str, tuple[float, float, float]]:
    """Return by operator microseconds, their ratio to the bound, and those of the thread that worked the longest."""
    bounds, per_layer = model.bounds(rows), 1e6 / model.layers
    times: dict[str, tuple[float, float, float]] = {}
    for name in OPERATORS[1:]:
        took = _quartile(each[0][name][0] for each in found) * per_layer
        if took > 0:
            threads = zip(*found, strict=True)
            worked = max(_quartile(each[name][0] - each[name][1] for each in own) for own in threads)
            times[name] = took, took / bounds[name].seconds(reached) / 1e6, worked * per_layer
    whole, least = (
        sum(took for took, *_ in times.values()),
        sum(bounds[name].seconds(reached) for name in times),
    )
    return {"whole": (whole, whole / least / 1e6, sum(own for *_, own in times.values())), **times}
