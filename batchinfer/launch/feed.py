"""Runs a plan on an engine: keeps it fed, and hands on what comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import numpy as np

from batchinfer.engine.config import EngineInfo
from batchinfer.launch.interrupts import Interrupts
from batchinfer.launch.messages import WorkDone
from batchinfer.plan.plan import Plan, Window
from batchinfer.plan.prefix_order import common_prefix, prefix_order, shared_with_next
from batchinfer.request import Request, SamplingParams, TokenIds

LONG_PARAMS = 16 << 10  # characters
WINDOW = 512  # requests in one message to the engine
QUEUED = 3  # times max_num_seqs: enough that the engine never waits for us, little enough to stay bounded
POLL_S = 0.1
DRAIN_S = 15.0  # after a signal: what runs may finish for so long
LATE_S = 3.0  # a worker in the middle of a long step hears of it only afterwards


class Prompts(Protocol):
    """Where the prompts' token ids lie."""

    def read(self, offset: int, count: int) -> TokenIds: ...


class Host(Protocol):
    """An engine, wherever it runs: EngineHost says what these mean."""

    @property
    def info(self) -> EngineInfo | None: ...
    @property
    def left(self) -> bool: ...
    def submit(self, requests: Sequence[Request]) -> None: ...
    def receive(self, timeout_s: float) -> list[WorkDone]: ...
    def finish(self, within_s: float) -> None: ...


class Sink(Protocol):
    """Takes what the engine gives back."""

    def planned(self, window: Window) -> None:
        """These requests go to the engine now."""

    def take(self, done: WorkDone) -> None:
        """These completions and samples came."""

    def enough(self) -> bool:
        """Whether to stop early, because going on is pointless."""

    def tick(self) -> None:
        """Time has passed."""


def run_plan(
    plan: Plan,
    prompts: Prompts,
    host: Host,
    sink: Sink,
    interrupts: Interrupts,
    draining: Callable[[float], None],
) -> None:
    """Feed the plan's windows in order until all is answered, `sink` has enough, or a signal comes.

    After a signal what runs may finish for DRAIN_S seconds; `draining` hears of it. Raises what ended the engine.
    """
    windows = _requests(plan, prompts)
    in_flight, more = 0, True
    while more or in_flight:
        if interrupts.pending is not None:
            if (
                in_flight and host.info is not None
            ):  # else nothing runs: a model may be loading, again perhaps
                draining(DRAIN_S)
                _drain(host, sink)
            return
        if sink.enough():
            return
        while more and host.info is not None and in_flight < max(WINDOW, QUEUED * host.info.max_num_seqs):
            read = next(windows, None)
            if read is None:
                more = False
                break
            window, requests = read
            sink.planned(window)
            host.submit(requests)
            in_flight += len(requests)
        for done in host.receive(POLL_S):
            in_flight -= len(done.completions)
            sink.take(done)
        sink.tick()
    _drain(host, sink)


def _drain(host: Host, sink: Sink) -> None:
    """Have the worker finish what runs and leave; whoever closes the host ends one that did not."""
    host.finish(DRAIN_S)
    give_up = time.monotonic() + DRAIN_S + LATE_S
    while not host.left and time.monotonic() < give_up:
        for done in host.receive(POLL_S):
            sink.take(done)
        sink.tick()


def _requests(plan: Plan, prompts: Prompts) -> Iterator[tuple[Window, list[Request]]]:
    """The plan's windows and their requests in the order in which they run, each of which knows what it shares with
    the next one. A window is held back until the next one is read, for its last request.
    """
    held: tuple[Window, list[Request]] | None = None
    for window in plan.windows(WINDOW):
        requests = _read(window, prompts)
        if held is not None:
            before = held[1]
            before[-1] = replace(before[-1], shares_next=common_prefix(before[-1].prompt, requests[0].prompt))
            yield held
        held = window, requests
    if held is not None:
        yield held


def _read(window: Window, prompts: Prompts) -> list[Request]:
    offsets, counts = window.numbers("token_offset").tolist(), window.numbers("token_count").tolist()
    expected, keys, params = window.numbers("expected_tokens").tolist(), window.keys, window.params
    ids = [np.asarray(prompts.read(*place), np.int32) for place in zip(offsets, counts, strict=True)]
    order = prefix_order(ids)
    shared = [*shared_with_next(ids[row] for row in order), 0]
    return [
        Request(keys[row], ids[row], _params(params[row], expected[row]), common)
        for row, common in zip(order, shared, strict=True)
    ]


def _params(text: str, expected: int) -> SamplingParams:
    """`expected` is max_tokens within the model's context. Fewer of the long ones are remembered: a row's schema may
    have a megabyte."""
    return (_few if len(text) > LONG_PARAMS else _many)(text, expected)


@lru_cache(maxsize=4096)
def _many(text: str, expected: int) -> SamplingParams:
    return replace(SamplingParams.from_json(text), max_tokens=expected)


_few = lru_cache(maxsize=64)(_many.__wrapped__)
