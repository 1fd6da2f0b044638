"""Loads the engine of a worker in two steps: first the weights, then, once the plan is known, all other parts."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from batchinfer.engine.ranks.division import RankConfig
from batchinfer.engine.schedule.constraints import ConstraintsFor
from batchinfer.engine.schedule.sequence import StopStreams
from batchinfer.machine.spawning import receiving
from batchinfer.pipeline.workers.heartbeat import Heartbeat
from batchinfer.pipeline.workers.messages import (
    Answer,
    Ask,
    Chosen,
    Configure,
    HeartbeatMessage,
    Load,
    Loaded,
    WorkerSpec,
)
from batchinfer.pipeline.workers.ranks.others import OtherRanks
from batchinfer.pipeline.workers.ranks.rendezvous import ParentConnection

T = TypeVar("T")


class EngineLoading:
    """Loads the engine of a worker in two phases: first the weights, then everything else.

    Each phase starts with a message from the driver, which is passed on to the engine's other ranks.
    """

    def __init__(self, spec: WorkerSpec, parent: ParentConnection, ranks: OtherRanks) -> None:
        self._spec, self._connection, self._ranks, self._untimed_blocks = spec, parent, ranks, 0

    def engine(self) -> Any:
        """Load and return the engine.

        Raises:
            EOFError: The driver is gone, or does not need the engine.
        """
        load_weights = import_function(self._spec.factory)
        self._received(Load)
        with Heartbeat(self._beat):
            return self._loaded(load_weights)

    def _loaded(self, load_weights: Callable[..., Any]) -> Any:
        ranks = self._ranks
        ranks.send(Load())
        stop_streams, constraints = _tokenizer_parts(self._spec)
        if ranks.rank_config is None:
            weights = load_weights(self._spec.load, constraints, self._untimed)
        else:
            weights = load_weights(self._spec.load, constraints, self._untimed, rank_config=ranks.rank_config)
            ranks.await_loaded()
        self._connection.send(Loaded(time.perf_counter()))
        configure = self._received(Configure)
        ranks.send(configure)
        send_step = () if ranks.rank_config is None else (ranks.send,)
        return weights.engine(configure.config, stop_streams, self._agreed, *send_step)

    def _beat(self) -> None:
        self._connection.send(HeartbeatMessage(self._untimed_blocks > 0, self._ranks.silent_rank()))

    def _received(self, kind: type[T]) -> T:
        return receive_message(self._connection.recv, kind)

    def _agreed(self, choose: Callable[[], str]) -> str:
        # The first engine that asks makes the choice for all engines of the run
        self._connection.send(Ask())
        chosen = self._received(Answer).chosen
        if chosen is None:
            chosen = choose()
            self._connection.send(Chosen(chosen))
        self._ranks.send(Answer(chosen))
        return chosen

    @contextmanager
    def _untimed(self) -> Iterator[None]:
        # Suspends the watchdog. Blocks may be nested, as for compilation during graph capture.
        self._untimed_blocks += 1
        self._connection.send(HeartbeatMessage(untimed=True))
        try:
            yield
        finally:
            self._untimed_blocks -= 1
            self._connection.send(HeartbeatMessage(untimed=self._untimed_blocks > 0))


class RankLoading:
    """Loads the shard of a rank other than rank 0: first the weights, then everything else.

    Each of these phases starts with a message from rank 0.
    """

    def __init__(self, spec: WorkerSpec, rank_config: RankConfig, connection: ParentConnection) -> None:
        self._spec, self._rank_config, self._connection = spec, rank_config, connection

    def follower(self) -> Any:
        """Load and return the object that runs the steps which rank 0 sends.

        Raises:
            EOFError: Rank 0 is gone.
        """
        load_weights = import_function(self._spec.factory)
        receive_message(self._connection.recv, Load)
        with Heartbeat(lambda: self._connection.send(HeartbeatMessage())):
            found = self._loaded(load_weights)
        self._connection.send(
            HeartbeatMessage(untimed=True)
        )  # from now on the driver watches the engine as a whole
        return found

    def _loaded(self, load_weights: Callable[..., Any]) -> Any:
        recv = self._connection.recv
        weights = load_weights(self._spec.load, rank_config=self._rank_config)
        self._connection.send(Loaded(time.perf_counter()))
        config = replace(receive_message(recv, Configure).config, load=self._spec.load)
        return weights.follower(config, self._agreed)

    def _agreed(self, choose: Callable[[], str]) -> str:
        chosen = receive_message(self._connection.recv, Answer).chosen
        assert chosen is not None, "rank 0 has chosen"
        return chosen


def import_function(factory: str) -> Callable[..., Any]:
    """Import a function by its name, "module:function"."""
    module, _, name = factory.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def receive_message(recv: Callable[[], object], kind: type[T]) -> T:
    """Receive the next message and return it.

    Args:
        recv: Receives a message.
        kind: The class of the message that must come.

    Raises:
        EOFError: The sender is gone, or the message has another class.
    """
    with receiving():
        message = recv()
    if not isinstance(message, kind):
        raise EOFError(f"{type(message).__name__} was sent instead of {kind.__name__}")
    return message


def _tokenizer_parts(spec: WorkerSpec) -> tuple[StopStreams | None, ConstraintsFor | None]:
    # Functions for stop strings and for constraints. They need a tokenizer.
    if spec.tokenizer is None:
        return None, None
    from batchinfer.input.constraints.constrained import grammar_constraints
    from batchinfer.input.tokenizer.stop_strings import stop_streams
    from batchinfer.input.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(spec.tokenizer)
    return stop_streams(tokenizer.rust), grammar_constraints(tokenizer)
