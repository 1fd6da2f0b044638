"""An engine factory for tests: an engine of two ranks that loses rank 1 at a step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

AT = "DIES_AT"  # which step; LOADING: before it has loaded
LOADING = "loading"
MISSED_S = 2.0  # that a rank which loads may be silent
HOW = "DIES_HOW"  # the name of a signal; "memory": it raises MemoryError
DIED = "DIED"  # a file, which is there once a rank was lost


class DyingFollower:
    """A follower that is lost at a step."""

    def __init__(self, follower: Any) -> None:
        at = os.environ[AT]
        self._follower, self._left = follower, 1 << 30 if at == LOADING else int(at)

    def run(self, step: Any) -> None:
        self._left -= 1
        if self._left < 0 and not Path(os.environ[DIED]).exists():
            Path(os.environ[DIED]).touch()
            if os.environ[HOW] == "memory":
                raise MemoryError("the rank was asked to have none")
            os.kill(os.getpid(), getattr(signal, os.environ[HOW]))
        self._follower.run(step)

    @property
    def account(self) -> Any:
        return self._follower.account


class DyingWeights:
    def __init__(self, weights: Any) -> None:
        self._weights = weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)

    def follower(self, *arguments: Any) -> DyingFollower:
        return DyingFollower(self._weights.follower(*arguments))


def build(*arguments: Any, **named: Any) -> DyingWeights:
    """Load weights like batchinfer.engine.load.build.load_weights, with a rank that is lost."""
    from batchinfer.engine.load import build as building
    from batchinfer.pipeline.workers.ranks import others

    others.MISSED_S = MISSED_S
    if os.environ[AT] == LOADING and named["rank_config"].rank and not Path(os.environ[DIED]).exists():
        Path(os.environ[DIED]).touch()
        time.sleep(0.5)  # by then it has said that it loads
        os.kill(os.getpid(), getattr(signal, os.environ[HOW]))

    return DyingWeights(building.load_weights(*arguments, **named))
