"""The real engine in a process that is killed once it has finished some of its rows; a second one is killed at once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.engine.config import EngineConfig

if TYPE_CHECKING:
    from batchinfer.engine.load.build import BuiltEngine

SENT_S = 0.2  # longer than what is finished waits to be sent


class Mortal:
    """An engine that is killed in its second step after `last` rows were finished."""

    def __init__(self, engine: Any, last: int) -> None:
        self._engine, self._left, self._sent = engine, last, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        if self._left <= 0 and self._sent:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._left <= 0:
            time.sleep(SENT_S)
            self._sent = True
        output = self._engine.step()
        self._left -= len(output.completions)
        return output


def build(config: EngineConfig, *beside: Any) -> BuiltEngine:
    """Build as batchinfer.engine.load.build.build_engine does, with what it gets `beside` the configuration.

    DIES_AFTER: how many rows; DIED: a file, there from the first start on.
    """
    died = Path(os.environ["DIED"])
    if died.exists():
        os.kill(os.getpid(), signal.SIGKILL)
    died.touch()
    from batchinfer.engine.load import build as building

    built = building.build_engine(config, *beside)
    mortal: Any = Mortal(built.engine, int(os.environ["DIES_AFTER"]))
    return building.BuiltEngine(mortal, built.info, built.read_loads)
