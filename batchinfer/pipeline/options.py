"""The options of a run, for the command line and for `batchinfer.run`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from batchinfer.core.errors import UsageError
from batchinfer.job.deadline import StopTime
from batchinfer.pipeline.workers.engine_entry import ENGINE
from batchinfer.pipeline.workers.standby import EngineStandby
from batchinfer.pipeline.workers.transport import PROCESSES, Transport

_SWITCHES = ("replace", "retry_errors", "verify", "openai_timestamps")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options that the command line adds to a job. Raises UsageError for an invalid value."""

    limit: int | None = None
    replace: bool = False
    retry_errors: bool = False
    verify: bool = False
    to_openai: Path | None = None
    openai_timestamps: bool = False
    engine: str = ENGINE  # "module:function" that loads the engine's weights in its process
    price_per_hour: float | None = None  # of the machine, in any currency
    stop_at: StopTime | None = None
    transport: Transport = PROCESSES  # starts workers and exchanges messages with them
    standby: EngineStandby | None = None  # a standby process for the engine
    # Rows run in waves if the engine would otherwise wait for the input for at least this many seconds. About the time
    # to plan the first rows; chosen, not measured.
    waves_from_s: float = 1.0
    already_s: float = 0.0  # seconds that the command took before: interpreter, imports, job file

    def __post_init__(self) -> None:
        limit, price = self.limit, self.price_per_hour
        if limit is not None and (not _is_whole(limit) or limit < 1):
            raise wrong("limit (--limit)", limit, "a whole number of rows from 1 up; leave it out for all")
        if price is not None and not (
            (_is_whole(price) or isinstance(price, float)) and 0 <= price < math.inf
        ):
            raise wrong("price_per_hour (--price-per-hour)", price, "a number from 0 up")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise wrong(name, getattr(self, name), "True or False")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def wrong(name: str, value: object, right: str) -> UsageError:
    """Return the error for an invalid argument.

    Args:
        name: The argument, and the option of the command line.
        value: The value that was passed.
        right: The valid values.
    """
    return UsageError(f"{name}: found {repr(value)[:80]}; it must be {right}")
