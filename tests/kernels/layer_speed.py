"""What each operator of a decoder layer takes among the others, beside its bound: layers of random weights, one after
the other, in turns with those of other sources.

    python -m tests.kernels.layer_speed [--against FOLDER] [--model 135m|1b] [--rows 16 128 ...] [--int8]

Rows decode with contexts of 96 tokens, or are those of one prompt from 512 on. bfloat16; microseconds a layer, the
lower quartile of many rounds: what passed, its ratio to the bound (bytes by the bandwidth that torch reaches), and in
brackets what the threads worked of it, waiting for one another left out.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from batchinfer.models.ops.peaks import measure_peaks
from batchinfer_kernels.cost import Cost, rms_norm_cost, rope_store_cost
from batchinfer_kernels.cpu import build
from batchinfer_kernels.cpu.attention_plan import attention_items
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.cpu.layer import (
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
SHOWN = ("input_norm", "codes", "rope_store", "post_norm")
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

    @property
    def sizes(self) -> LayerSizes:
        return LayerSizes(self.q_heads, self.kv_heads, self.dim, self.dim**-0.5, 1e-5)

    def bounds(self, rows: int) -> dict[str, Cost]:
        norm = rms_norm_cost(rows, self.hidden, 2, residual=True)
        return {
            "input_norm": norm,
            "post_norm": norm,
            "rope_store": rope_store_cost(rows, self.q_heads, self.kv_heads, self.dim, 2),
            "codes": Cost(0, 3 * rows * (2 * self.hidden + self.q_heads * self.dim + self.inner)),
        }


MODELS = {"135m": Model(30, 576, 1536, 9, 3), "1b": Model(4, 2048, 8192, 32, 8)}


class Timed:
    """The operators of a folder, their clock, and layers of them."""

    def __init__(self, folder: Path, cache: Path, model: Model, int8: bool) -> None:
        with clocked(folder):
            self.compiled = CompiledOperators(cache)
            self._library = ctypes.CDLL(str(build.library_path(cache)))
        self.model = model
        self._layers = [self._layer(int8) for _ in range(model.layers)]

    def _layer(self, int8: bool) -> PackedLayer:
        m, angles = (
            self.model,
            torch.outer(torch.arange(4096.0), 1e4 ** -torch.linspace(0, 1, self.model.dim // 2)),
        )
        heads = (m.q_heads + 2 * m.kv_heads) * m.dim
        weights = LayerWeights(
            torch.ones(m.hidden).bfloat16(),
            torch.ones(m.hidden).bfloat16(),
            None,
            None,
            LayerRotation(angles.cos(), angles.sin()),
            self._packed(heads, m.hidden, int8),
            self._packed(m.hidden, m.q_heads * m.dim, int8),
            self._packed(2 * m.inner, m.hidden, int8, "gated"),
            self._packed(m.hidden, m.inner, int8),
            None,
        )
        return PackedLayer(weights, m.sizes)

    def _packed(self, outputs: int, inputs: int, int8: bool, kind: Kind = "plain") -> PackedWeight:
        weight = (torch.randn(outputs, inputs) * inputs**-0.5).bfloat16()
        if int8:
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
        items = attention_items(lens, contexts, m.q_heads // m.kv_heads)
        shape = self._compiled.cache_shape(m.kv_heads, BLOCK, m.dim)
        self._caches = [zeros_in_huge_pages((2, len(order), *shape), torch.bfloat16) for _ in layers]
        self._x = torch.randn(rows, m.hidden).bfloat16()
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
def clocked(folder: Path) -> Iterator[None]:
    """While it lasts, operators are built from that folder, and with a clock."""
    before = build.FLAGS, build.FOLDER, build.SOURCES
    clock = ("-include", str(HERE / "layer_clock.h"), "-Wl,--wrap=GOMP_barrier")
    build.FLAGS, build.FOLDER = (*build.FLAGS, *clock), folder
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
    parser.add_argument("--seconds", type=float, default=4.0, help="of each number of rows and each folder")
    options = parser.parse_args()
    model, bandwidth = MODELS[options.model], measure_peaks("cpu", ("bfloat16",)).bandwidth
    print(f"{bandwidth / 1e9:.1f} GB/s")
    with tempfile.TemporaryDirectory() as cache:
        folders = [build.FOLDER, *(folder.resolve() for folder in options.against)]
        timed = []
        for folder in folders:
            torch.manual_seed(0)
            timed.append(Timed(folder, Path(cache), model, options.int8))
        for rows in options.rows:
            _compare(timed, rows, bandwidth, options.seconds)


def _compare(timed: list[Timed], rows: int, bandwidth: float, seconds: float) -> None:
    steps = []
    for one in timed:
        torch.manual_seed(rows)
        steps.append(one.step(rows))
    rounds: list[list[list[dict[str, tuple[float, float]]]]] = [[] for _ in timed]
    end = time.perf_counter() + seconds * len(timed)
    for step in steps:
        step.run()
    same = all(
        torch.equal(a, b) for step in steps for a, b in zip(step.results, steps[0].results, strict=True)
    )
    while time.perf_counter() < end or len(rounds[0]) < LEAST_ROUNDS:
        for one, step, found in zip(timed, steps, rounds, strict=True):
            one.read(torch.get_num_threads())
            step.run()
            found.append(one.read(torch.get_num_threads()))
    for one, found in zip(timed, rounds, strict=True):
        del found[: len(found) // 10]
        print(_line(one.model, rows, found, bandwidth), flush=True)
    if not same:
        print("the results differ")


def _quartile(values: Iterable[float]) -> float:
    """The lower one: what others do on the machine only lengthens."""
    return statistics.quantiles(values, n=4)[0]


def _line(
    model: Model, rows: int, found: list[list[dict[str, tuple[float, float]]]], bandwidth: float
) -> str:
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

    for name in SHOWN:
        if took(name) > 0:
            bound = bounds[name].bytes / bandwidth * 1e6
            parts.append(f"{name} {took(name):7.2f} {took(name) / bound:5.2f} ({worked(name):7.2f})")
    rest = " ".join(f"{name} {took(name):.0f}" for name in OPERATORS[1:] if name not in SHOWN)
    whole = sum(took(name) for name in OPERATORS[1:])
    return f"{rows:5} {'  '.join(parts)}  whole {whole:8.1f}: {rest}"


if __name__ == "__main__":
    main()
