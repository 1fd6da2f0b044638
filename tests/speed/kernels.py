"""The time of each operator in a decoder layer, compared with its bound and with other sources."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
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
from batchinfer_kernels.cpu.packed_weights import Kind, PackedWeight
from batchinfer_kernels.quantized_linear import quantize_weight
from tests.suite.section import BenchSection, Part, Result
from tests.suite.turns import in_turns

HERE = Path(__file__).parent
# The counters of layer_clock.h, in its order
BETWEEN, *OPERATORS = (
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
CONTEXT, PROMPT, BLOCK = 96, 512, 16  # tokens; a step of PROMPT rows is one prompt
LEAST_ROUNDS = 5
# Per thread, by operator: elapsed seconds, and seconds spent waiting
Clocks = list[dict[str, tuple[float, float]]]


@dataclass(frozen=True)
class Model:
    """The sizes of a model's layers, too large for any CPU cache."""

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
    """The operators of a folder, their clock, and layers that use them."""

    def __init__(self, folder: Path, place: Path, model: Model, one_core: bool) -> None:
        with clocked(folder, one_core):
            self.compiled = CompiledOperators(place)
            self._library = ctypes.CDLL(str(build.library_path(place)))
        self.model = model
        self._layers = [self._layer() for _ in range(model.layers)]

    def _layer(self) -> PackedLayer:
        m = self.model
        angles = torch.outer(torch.arange(4096.0), 1e4 ** -torch.linspace(0, 1, m.dim // 2))
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
        """Return the clocks since the previous call."""
        found, names = [], (BETWEEN, *OPERATORS)
        for thread in range(threads):
            passed, waited = ((ctypes.c_double * len(names))() for _ in range(2))
            self._library.read_clock(ctypes.c_int64(thread), passed, waited)
            found.append(dict(zip(names, zip(passed, waited, strict=True), strict=True)))
        return found


class Step:
    """A step of some rows through all layers, each with its own cache."""

    def __init__(self, timed: Timed, layers: Sequence[PackedLayer], rows: int) -> None:
        m, self._compiled, self._layers = timed.model, timed.compiled, layers
        lens, contexts = ([rows], [rows]) if rows >= PROMPT else ([1] * rows, [CONTEXT] * rows)
        blocks = -(-contexts[0] // BLOCK)
        order = torch.randperm(len(lens) * blocks, generator=torch.Generator().manual_seed(1)).int()
        tables = order.view(len(lens), blocks)
        first = contexts[0] - lens[0]
        positions = torch.arange(first, contexts[0]).repeat(len(lens))
        own = positions[: lens[0]]
        slots = (tables[:, own // BLOCK] * BLOCK + own % BLOCK).flatten().long()
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
        for layer, (k, v) in zip(self._layers, self._caches, strict=True):
            self._compiled.decoder_layer(layer, self._room, k, v, False)

    @property
    def result(self) -> Tensor:
        return self._room.x


@contextmanager
def clocked(folder: Path, one_core: bool) -> Iterator[None]:
    """Build operators from a folder with a clock while the block runs."""
    before = build.FLAGS, build.FOLDER, build.SOURCES
    clock = ("-include", str(HERE / "layer_clock.h"), "-Wl,--wrap=GOMP_barrier")
    counted = ("-DCLOCK=CLOCK_THREAD_CPUTIME_ID",) if one_core else ()
    build.FLAGS, build.FOLDER = (*build.FLAGS, *clock, *counted), folder
    build.SOURCES = tuple(folder / source.name for source in build.SOURCES)
    try:
        yield
    finally:
        build.FLAGS, build.FOLDER, build.SOURCES = before


def parts(section: BenchSection) -> list[Part]:
    """Return a part for each number of rows. Layers of random weights run in sequence, in turns with layers of other
    sources. Rows decode with contexts of 96 tokens; from 512 rows on, they are one prompt."""
    return [(f"{rows} rows", partial(_layers, section, rows)) for rows in section.given.rows]


def _layers(section: BenchSection, rows: int) -> list[Result]:
    """Time all sources in turns, our own first."""
    given = section.given
    reached = _peaks(given.dtype, given.one_core)
    model = replace(MODELS[given.model], dtype=getattr(torch, given.dtype), int8=given.int8)
    folders = (build.FOLDER, *(folder.resolve() for folder in given.against))
    timed = {str(folder): _timed(folder, section.place, model, given.one_core) for folder in folders}
    rounds, differing = _rounds(timed, rows, given.seconds)
    results = [
        _times(f"{rows} rows, {folder}", model, rows, found, reached) for folder, found in rounds.items()
    ]
    ours, *others = rounds
    for folder in others:
        facts = {"rounds": len(rounds[ours]), "results": differing[folder]}
        metrics = _ratios(rounds[ours], rounds[folder])
        results.append(Result(f"{rows} rows, ours ÷ {folder}", facts, metrics=metrics))
    return results


@cache
def _timed(folder: Path, place: Path, model: Model, one_core: bool) -> Timed:
    torch.manual_seed(0)
    return Timed(folder, place, model, one_core)


@cache
def _peaks(dtype: str, one_core: bool) -> Peaks:
    """Return measured peaks; with one core, by CPU time from now on."""
    if one_core:
        torch.set_num_threads(1)
        peaks._timed = _cpu_timed
    found = peaks.measure_peaks("cpu", (dtype, "int8"))
    return Peaks(found.peak_flops[dtype], found.bandwidth, found.peak_flops["int8"])


def _cpu_timed(call: Callable[[], object], where: torch.device) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


def _rounds(
    timed: dict[str, Timed], rows: int, seconds: float
) -> tuple[dict[str, list[Clocks]], dict[str, str]]:
    """Return each source's clocks without the first tenth, and how its results differ from the first
    source's."""
    steps = dict[str, Step]()
    for folder, own in timed.items():
        torch.manual_seed(rows)
        steps[folder] = own.step(rows)
        steps[folder].run()
    first = next(iter(steps.values()))
    differing = {folder: _apart(step.result, first.result) for folder, step in steps.items()}

    def clocks(folder: str, _: int) -> Clocks:
        timed[folder].read(torch.get_num_threads())
        steps[folder].run()
        return timed[folder].read(torch.get_num_threads())

    end = time.monotonic() + seconds * len(steps)
    calls = {folder: partial(clocks, folder) for folder in steps}
    found = in_turns(calls, LEAST_ROUNDS)
    while time.monotonic() < end:
        for folder, more in in_turns(calls, 1).items():
            found[folder] += more
    return {folder: own[len(own) // 10 :] for folder, own in found.items()}, differing


def _apart(found: Tensor, first: Tensor) -> str:
    """Return the rows whose results differ from the first operators' results, and the maximum difference."""
    differing = (found != first).any(1).nonzero().flatten().tolist()
    return f"differ in rows {differing} by up to {(found - first).abs().max():.3g}" if differing else "equal"


def _quartile(values: Iterable[float]) -> float:
    """Return the lower quartile: other work on the machine only adds time."""
    return statistics.quantiles(values, n=4)[0]


def _ratios(first: list[Clocks], other: list[Clocks]) -> dict[str, float]:
    """Return the median ratio over all rounds, for the whole layer and each operator."""
    pairs = [(a[0], b[0]) for a, b in zip(first, other, strict=True)]
    run = [name for name in OPERATORS if all(b[name][0] for _, b in pairs)]

    def ratio(names: Sequence[str]) -> float:
        return statistics.median(sum(a[n][0] for n in names) / sum(b[n][0] for n in names) for a, b in pairs)

    return {"whole": ratio(OPERATORS), **{name: ratio([name]) for name in run}}


def _times(name: str, model: Model, rows: int, found: list[Clocks], reached: Peaks) -> Result:
    """Return the time of each operator in a layer, also as a multiple of its roofline.

    `working`: without waiting for other threads, of the thread that waits the least.
    """
    bounds, took, least = model.bounds(rows), dict[str, float](), dict[str, float]()
    for operator in OPERATORS:
        passed = _quartile(each[0][operator][0] for each in found) / model.layers
        if passed > 0:
            took[operator] = passed
            threads = zip(*found, strict=True)
            worked = (_quartile(each[operator][0] - each[operator][1] for each in own) for own in threads)
            least[operator] = max(worked) / model.layers
    bound = {operator: bounds[operator].seconds(reached) for operator in took}
    texts = {
        operator: f"{1e6 * seconds:.2f} µs, {seconds / bound[operator]:.2f} × its bound"
        for operator, seconds in took.items()
    }
    whole = {"layer_s": sum(took.values()), "working_s": sum(least.values())}
    metrics = {**whole, "of_its_bound": whole["layer_s"] / sum(bound.values()), **texts}
    return Result(name, metrics=metrics, details={"took_s": took, "working_s": least, "bound_s": bound})
