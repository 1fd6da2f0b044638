"""An engine during whose start somebody appends to the input."""

from __future__ import annotations

import os
from contextlib import nullcontext

from batchinfer.engine.config import Agreed, EngineConfig, Untimed, alone
from batchinfer.engine.load.build import BuiltEngine
from batchinfer.engine.schedule.constraints import ConstraintsFor
from batchinfer.engine.schedule.sequence import StopStreams
from tests import fake_engine


def build(
    config: EngineConfig,
    stop_streams: StopStreams | None = None,
    constraints: ConstraintsFor | None = None,
    untimed: Untimed = nullcontext,
    agreed: Agreed = alone,
) -> BuiltEngine:
    """As the fake engine's; MEDDLE_WITH names the file."""
    with open(os.environ["MEDDLE_WITH"], "ab") as file:
        file.write(b'{"id": "late", "text": "late"}\n')
    return fake_engine.build(config, stop_streams, constraints, untimed, agreed)
