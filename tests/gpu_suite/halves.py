"""Layers of a decode step on halves of its rows, attention to one half beside the products of the other.

Products are bound by arithmetic and attention by memory where many rows decode (NanoFlow, Zhu et al., OSDI 2025). Each
kind of work has a queue of its own, and the halves take turns in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from batchinfer_kernels.gpu.gated_activation import gated_activation
from batchinfer_kernels.gpu.paged_attention import paged_attention
from batchinfer_kernels.gpu.rms_norm import rms_norm
from batchinfer_kernels.paged_attention import ScoreRules
from tests.gpu_suite.paged import Heads
from tests.gpu_suite.step import DTYPE, AttentionStep, planned
from tests.suite.section import BenchSection

EPS = 1e-6


class Queue(Protocol):
    """Runs what it is given in the order in which it is given it."""

    def run(self, call: Callable[[], None]) -> None:
        """Run a call behind all before it."""

    def mark(self) -> Any:
        """Return a mark behind all that was given so far."""

    def wait(self, mark: Any) -> None:
        """Let what is given from here on wait for another queue's mark."""

    def end(self, call: Callable[[], Tensor]) -> Tensor:
        """Run the last call of all queues, and return what it gives."""


class StreamQueue:
    """A CUDA stream, which begins behind what the present stream has been given and ends before what comes next."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        stream.wait_stream(torch.cuda.current_stream())

    def run(self, call: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            call()

    def mark(self) -> Any:
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        self._stream.wait_event(mark)

    def end(self, call: Callable[[], Tensor]) -> Tensor:
        """Let the present stream wait, too."""
        with torch.cuda.stream(self._stream):
            result = call()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result


class HostQueue:
    """Launches in the present stream, or runs on the CPU at once: everything follows what was given before."""

    def run(self, call: Callable[[], None]) -> None:
        call()

    def mark(self) -> None:
        """Return nothing: there is nothing to wait for."""

    def wait(self, mark: None) -> None:
        """Wait for nothing."""

    def end(self, call: Callable[[], Tensor]) -> Tensor:
        return call()


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of a layer, each (inputs, outputs)."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def random(cls, hidden: int, intermediate: int, heads: Heads, device: torch.device) -> LayerWeights:
        """Normal numbers, such that results are about as large as what goes in."""
        wide = heads.q * heads.dim
        return cls(
            *(
                _normal(inputs, outputs, device)
                for inputs, outputs in (
                    (hidden, wide + 2 * heads.kv * heads.dim),
                    (wide, hidden),
                    (hidden, 2 * intermediate),
                    (intermediate, hidden),
                )
            )
        )


def _normal(inputs: int, outputs: int, device: torch.device) -> Tensor:
    weight: Tensor = torch.randn(inputs, outputs, device=device) / float(inputs) ** 0.5
    return weight.to(DTYPE)


class DecodeRows:
    """Rows that decode, and what a layer hands on to the next. Attention reads the cache as it is: K and V of the new
    tokens are not written, which takes no part in what is compared."""

    def __init__(self, step: AttentionStep, x: Tensor) -> None:
        heads = step.paged.heads
        self.step, self._x = step, x
        self._ones = torch.ones(x.shape[1], dtype=x.dtype, device=x.device)
        self._heads = (len(x), heads.q + 2 * heads.kv, heads.dim)
        # Written by one queue and read by the other, so that they stay where they are
        self.qkv = torch.empty(len(x), self._heads[1] * heads.dim, dtype=x.dtype, device=x.device)
        self.attended = torch.empty(len(x), heads.q, heads.dim, dtype=x.dtype, device=x.device)
        self.begin()

    def begin(self) -> None:
        """Forget the last call's layers."""
        self._delta, self._total = self._x, torch.zeros_like(self._x)

    def enter(self, weights: LayerWeights) -> None:
        """Run the products in front of a layer's attention."""
        normed = self._normed()
        torch.mm(normed, weights.qkv, out=self.qkv)

    def attend(self) -> None:
        """Run a layer's attention."""
        paged, q = self.step.paged, self.qkv.view(self._heads)[:, : self.step.paged.heads.q]
        paged_attention(
            *(q, paged.k, paged.v, paged.table, self.step.plan, ScoreRules(paged.heads.scale)),
            out=self.attended,
        )

    def leave(self, weights: LayerWeights) -> None:
        """Run the products behind a layer's attention."""
        self._delta = self.attended.flatten(1) @ weights.o
        self._delta = gated_activation(self._normed() @ weights.gate_up, "silu") @ weights.down

    @property
    def result(self) -> Tensor:
        """(rows, hidden): what the last layer hands on."""
        return self._delta + self._total

    def _normed(self) -> Tensor:
        normed, self._total = rms_norm(self._delta, self._ones, EPS, self._total)
        return normed


def run_layers(
    parts: Sequence[DecodeRows], layers: Sequence[LayerWeights], products: Queue, attention: Queue
) -> Tensor:
    """Run the layers for each part of the rows; return (rows, hidden).

    While one part is attended to, the products queue has the next part's. Waits for nothing on the host.
    """
    attended: list[Any] = [None] * len(parts)
    for part in parts:
        products.run(part.begin)
    for weights, at in _turns(layers, len(parts)):
        before, now = weights
        part = parts[at]
        if before is not None:
            products.wait(attended[at])
            products.run(_bound(part.leave, before))
        if now is not None:
            products.run(_bound(part.enter, now))
            attention.wait(products.mark())
            attention.run(part.attend)
            attended[at] = attention.mark()
    return products.end(lambda: torch.cat([part.result for part in parts]))


def _turns(
    layers: Sequence[LayerWeights], parts: int
) -> Iterator[tuple[tuple[LayerWeights | None, LayerWeights | None], int]]:
    """Yield (the layer that a part leaves, the one that it enters), and the part."""
    for pair in zip((None, *layers), (*layers, None), strict=True):
        for at in range(parts):
            yield pair, at


def _bound(call: Callable[[LayerWeights], None], weights: LayerWeights) -> Callable[[], None]:
    return lambda: call(weights)


def decode_rows(section: BenchSection, heads: Heads, hidden: int, contexts: Sequence[int]) -> DecodeRows:
    """Return random rows with a cache of their own."""
    step = AttentionStep.decode(section, heads, contexts)
    return DecodeRows(step, torch.randn(len(contexts), hidden, device=section.device).to(DTYPE))


def halves_of(rows: DecodeRows) -> list[DecodeRows]:
    """Return the two halves of an even number of rows, in the same cache."""
    paged, half = rows.step.paged, len(rows.step.paged.contexts) // 2
    found = []
    for own in (slice(0, half), slice(half, None)):
        part = replace(paged, contexts=paged.contexts[own], table=paged.table[own])
        found.append(DecodeRows(replace(rows.step, paged=part, plan=planned(part, 1)), rows._x[own]))
    return found
