"""Engines that start before the plan: errors that end the run, and deaths that the pool handles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from batchinfer.core.errors import BatchInferError, JobFileError, OutOfMemory, SecurityRefusal, Unavailable
from batchinfer.engine.config import LoadConfig
from batchinfer.pipeline.workers.launch import Launch
from batchinfer.pipeline.workers.messages import Failed, HeartbeatMessage, Load, WorkerSpec
from tests.memory_transport import DiedError, MemoryTransport

SPEC = WorkerSpec(LoadConfig(Path("model"), "float32", "cpu"), None)
DIES = "dies"


class Ending:
    """A worker that sends two heartbeats while loading, and then ends as its fate says."""

    def __init__(self, fate: type[BatchInferError] | str | None) -> None:
        self._fate, self._loads, self._said = fate, False, 0

    def hear(self, message: object) -> None:
        assert isinstance(message, Load)
        assert not self._loads, "Load is sent once"
        self._loads = True

    def turn(self) -> list[object]:
        if not self._loads:
            return []
        self._said += 1
        if self._said <= 2:
            return [HeartbeatMessage(untimed=True), HeartbeatMessage()]
        if self._fate == DIES:
            raise DiedError
        return [Failed(self._fate.exit_code, "it cannot", "")] if isinstance(self._fate, type) else []


def launched(*fates: type[BatchInferError] | str | None) -> tuple[Launch, MemoryTransport]:
    """Start workers with these fates, and poll until nothing more can happen."""
    left = iter(fates)
    transport = MemoryTransport(lambda _: Ending(next(left)))
    launch = Launch(transport)
    launch.open([SPEC] * len(fates))
    launch.receive_messages()
    launch.load()
    return launch, transport


def looked(launch: Launch) -> int | None:
    """Return the exit code of the error that ends the run."""
    try:
        for _ in range(20):
            launch.receive_messages()
    except BatchInferError as error:
        return error.exit_code
    return None


@pytest.mark.parametrize(("fates", "code"), [
    ([None], None),
    ([OutOfMemory], 71),
    ([Unavailable], 69),
    ([JobFileError], 78),
    ([DIES], None),
    ([None, OutOfMemory], None),
    ([Unavailable, OutOfMemory], None),
    ([None, SecurityRefusal], 77),
    ([DIES, JobFileError], 78),
])  # fmt: skip
def test_an_error_that_affects_all_engines_ends_the_run(
    fates: Sequence[type[BatchInferError] | str | None], code: int | None
) -> None:
    launch, transport = launched(*fates)
    with launch:
        assert looked(launch) == code
    assert all(link.closed for link in transport.started)


def test_only_the_engines_that_are_wanted_are_handed_over() -> None:
    launch, transport = launched(None, None)
    assert len(launch.workers_for([SPEC] * 2)) == 2
    assert not any(link.closed for link in transport.started)
    other = replace(SPEC, load=replace(SPEC.load, threads=1))
    assert launch.workers_for([SPEC, other]) == []
    assert all(link.closed for link in transport.started)


def test_messages_of_engines_that_wait_are_not_read() -> None:
    """An engine that fails to import a library only fails runs that need it."""
    transport = MemoryTransport(lambda _: Ending(DIES))
    with Launch(transport) as launch:
        launch.open([SPEC])
        transport.started[0].kill()
        assert looked(launch) is None
