"""Whether a decode step gains where attention to half of its rows runs beside the products of the other half.

The engine runs a step's operators one after the other. What is measured here decides whether it is to run them so:
layers with all rows at once, beside the same layers with two halves, in one stream and in two, of which one may go
first or attention may have some of the GPU's multiprocessors only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.cuda.green_contexts import GreenContext

from batchinfer_kernels.cost import Cost, attention_cost, linear_cost
from tests.gpu_suite.attention import LLAMA_8B
from tests.gpu_suite.case import TOLERANCE, Case, distance, measured
from tests.gpu_suite.halves import (
    DecodeRows,
    HostQueue,
    LayerWeights,
    StreamQueue,
    decode_rows,
    halves_of,
    run_layers,
)
from tests.gpu_suite.paged import Heads
from tests.gpu_suite.step import DTYPE
from tests.suite.clock import Call
from tests.suite.section import BenchSection, Part

LAYERS = 4  # more than fill and drain what runs side by side
HIDDEN, INTERMEDIATE = 4096, 14_336  # of Llama 3.1 8B
SIZES = ((1024, 640), (512, 1280), (256, 2560), (512, 640))  # rows, context
SHARES = (1 / 4, 1 / 3, 1 / 2)  # of the multiprocessors, for attention
FIRST, LAST = -1, 0  # priorities of streams
ONE, TWO = "halves, one stream", "halves, two streams"
CHECKED = (ONE, TWO)  # the others differ from them in when a kernel runs


def parts(section: BenchSection) -> list[Part]:
    """Return a part a size."""
    if section.rehearsal:
        return [_part(section, Heads(4, 2, 16, 16), 64, 48, 4, 20)]
    return [_part(section, LLAMA_8B, HIDDEN, INTERMEDIATE, *size) for size in SIZES]


def _part(
    section: BenchSection, heads: Heads, hidden: int, intermediate: int, rows: int, context: int
) -> Part:
    name = f"{rows} rows of {context}"
    return f"halves, {name}", lambda: measured(
        section, halves_case(section, name, heads, (hidden, intermediate), [context] * rows)
    )


def halves_case(
    section: BenchSection, size: str, heads: Heads, widths: tuple[int, int], contexts: Sequence[int]
) -> Case:
    """`widths`: hidden and intermediate. Compared with the ways in which halves can run."""
    whole = decode_rows(section, heads, widths[0], contexts)
    halves = halves_of(whole)
    layers = [LayerWeights.random(*widths, heads, section.device) for _ in range(LAYERS)]
    ours, others = partial(_in_one_stream, [whole], layers), ways(halves, layers, section.device)
    checked = [call for name, call in others.items() if name in CHECKED]
    return Case(
        "decode layers",
        size,
        layer_cost(heads, *widths, contexts) * LAYERS,
        "bfloat16",
        ours,
        lambda: max(distance(call(), ours()) for call in checked),
        # Each layer rounds anew, and other tiles may sum in another order
        LAYERS * TOLERANCE[DTYPE],
        others,
    )


def ways(halves: list[DecodeRows], layers: list[LayerWeights], device: torch.device) -> Mapping[str, Call]:
    """Return how halves can run on this device."""
    found: dict[str, Call] = {ONE: partial(_in_one_stream, halves, layers)}
    if device.type == "cuda":
        found |= {name: _on_streams(halves, layers, make) for name, make in _streams(device).items()}
    return found


Streams = tuple[torch.cuda.Stream, torch.cuda.Stream]  # of products, and of attention


def _streams(device: torch.device) -> dict[str, Callable[[], Streams]]:
    """Return the pairs of streams to try, by name; they are made when they are first needed."""
    stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
    found: dict[str, Callable[[], Streams]] = {
        TWO: lambda: (stream(), stream()),
        "halves, products first": lambda: (stream(priority=FIRST), stream(priority=LAST)),
        "halves, attention first": lambda: (stream(priority=LAST), stream(priority=FIRST)),
    }
    count = torch.cuda.get_device_properties(device).multi_processor_count
    for sms in (round(count * share) for share in SHARES if hasattr(GreenContext, "Stream")):
        found[f"halves, attention on {sms} SMs"] = partial(_divided, sms)
    return found


def _divided(sms: int) -> Streams:
    """Return streams of which attention's has so many multiprocessors, and products' goes first on all. Raises what
    torch and the driver raise where they cannot divide them."""
    context: Any = GreenContext.create(num_sms=sms)
    make: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
    return make(priority=FIRST), context.Stream()


def _in_one_stream(rows: Sequence[DecodeRows], layers: Sequence[LayerWeights]) -> Tensor:
    queue = HostQueue()
    return run_layers(rows, layers, queue, queue)


def _on_streams(
    rows: Sequence[DecodeRows], layers: Sequence[LayerWeights], make: Callable[[], Streams]
) -> Call:
    made: list[Streams] = []

    def call() -> Tensor:
        if not made:
            made.append(make())
        products, attention = (StreamQueue(stream) for stream in made[0])
        return run_layers(rows, layers, products, attention)

    return call


def layer_cost(heads: Heads, hidden: int, intermediate: int, contexts: Sequence[int]) -> Cost:
    """Return the cost of a layer's products and attention, one after the other."""
    return products_cost(heads, hidden, intermediate, len(contexts)) + own_attention_cost(heads, contexts)


def products_cost(heads: Heads, hidden: int, intermediate: int, rows: int) -> Cost:
    """Return the cost of a layer's four products."""
    wide = heads.q * heads.dim
    sizes = (
        (hidden, wide + 2 * heads.kv * heads.dim),
        (wide, hidden),
        (hidden, 2 * intermediate),
        (intermediate, hidden),
    )
    return sum((linear_cost(rows, inputs, outputs, 2, 2) for inputs, outputs in sizes), Cost())


def own_attention_cost(heads: Heads, contexts: Sequence[int]) -> Cost:
    """Return the cost of attention of one query a sequence."""
    keys = sum(contexts)
    return attention_cost(len(contexts), keys, keys, heads.q, heads.kv, heads.dim, 2, False)
