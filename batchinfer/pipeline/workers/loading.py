"""The loading of a worker's engine. What needs no plan comes first, and is done while the parent reads its input."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from batchinfer.engine.schedule.constraints import ConstraintsFor
from batchinfer.engine.schedule.sequence import StopStreams
from batchinfer.machine.spawning import receiving
from batchinfer.pipeline.workers.messages import (
    Answer,
    Ask,
    Chosen,
    Configure,
    Load,
    Loaded,
    Pulse,
    WorkerSpec,
)

T = TypeVar("T")


class EngineLoading:
    """Makes the engine, in two steps: the second is taken when the parent knows what is to run. Until the engine is
    made, nothing is received but what is waited for."""

    def __init__(self, spec: WorkerSpec, connection: Connection[Any, Any]) -> None:
        self._spec, self._connection, self._untimed_blocks = spec, connection, 0

    def engine(self) -> Any:
        """Make the engine. Raises EOFError when the parent is gone, or needs none."""
        module, _, name = self._spec.factory.partition(":")
        load_weights = getattr(importlib.import_module(module), name)
        self._received(Load)
        stop_streams, constraints = _tokenizer_parts(self._spec)
        weights = load_weights(self._spec.load, constraints, self._untimed)
        self._connection.send(Loaded(time.perf_counter()))
        return weights.engine(self._received(Configure).config, stop_streams, self._agreed)

    def _received(self, kind: type[T]) -> T:
        with receiving():
            message = self._connection.recv()
        if not isinstance(message, kind):
            raise EOFError(f"the parent sent {type(message).__name__} instead of {kind.__name__}")
        return message

    def _agreed(self, choose: Callable[[], str]) -> str:
        """Return the choice that all engines of this run share; the first engine that asks makes it."""
        self._connection.send(Ask())
        answer = self._received(Answer)
        if answer.chosen is not None:
            return answer.chosen
        chosen = choose()
        self._connection.send(Chosen(chosen))
        return chosen

    @contextmanager
    def _untimed(self) -> Iterator[None]:
        """Tell the parent that the work inside has no limit of time, and is no hang. May be nested: kernels
        are compiled while a graph is captured."""
        self._untimed_blocks += 1
        self._connection.send(Pulse(untimed=True))
        try:
            yield
        finally:
            self._untimed_blocks -= 1
            self._connection.send(Pulse(untimed=self._untimed_blocks > 0))


def _tokenizer_parts(spec: WorkerSpec) -> tuple[StopStreams | None, ConstraintsFor | None]:
    """Return the parts of the engine that need a tokenizer."""
    if spec.tokenizer is None:
        return None, None
    from batchinfer.data.constraints.constrained import grammar_constraints
    from batchinfer.data.tokenizer.stop_strings import stop_streams
    from batchinfer.data.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(spec.tokenizer)
    return stop_streams(tokenizer.rust), grammar_constraints(tokenizer)
