"""The real engine in a process that is killed after some of its rows.

A second process is killed at once.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.engine.config import LoadConfig

if TYPE_CHECKING:
    from batchinfer.engine.load.build import BuiltEngine

SENT_S = 0.2  # longer than the delay before a finished answer is sent


class Mortal:
    """An engine that is killed in the second step after `last` rows were finished."""

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


def build(config: LoadConfig, *beside: Any) -> MortalWeights:
    """Load weights for an engine that dies after the first rows, and die at once in any later process.

    Environment variables: DIES_AFTER is the number of rows. DIED is a file that the first process creates.
    """
    died = Path(os.environ["DIED"])
    if died.exists():
        os.kill(os.getpid(), signal.SIGKILL)
    died.touch()
    return MortalWeights(config, beside, int(os.environ["DIES_AFTER"]))


class MortalWeights:
    """Weights whose engines are killed after `last` rows."""

    def __init__(self, config: LoadConfig, beside: tuple[Any, ...], last: int) -> None:
        from batchinfer.engine.load import build as building

        self._loaded, self._last = building.load_weights(config, *beside), last

    def engine(self, *arguments: Any) -> BuiltEngine:
        built = self._loaded.engine(*arguments)
        mortal: Any = Mortal(built.engine, self._last)
        return replace(built, engine=mortal)
