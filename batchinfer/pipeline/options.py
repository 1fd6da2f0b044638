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
    """The options of a run that are not in the job file.

    Attributes:
        limit: Number of first rows to run as a trial. None: all rows.
        replace: Whether the result may replace the result of another job.
        retry_errors: Whether rows with a retryable error are computed again.
        verify: Whether files of earlier runs are checked, and damaged files ignored.
        to_openai: File for the result as OpenAI responses, or None.
        openai_timestamps: Whether that file has the time of the run. False: its timestamps are 0.
        engine: "module:function" that loads an engine's weights in its process.
        price_per_hour: Price of an hour of the machine, in any currency.
        stop_at: Time at which the run stops, or None.
        transport: Starts workers and exchanges messages with them.
        standby: A standby process that becomes the engine's process, or None.
        waves_from_s: Rows run in waves if the engine would otherwise wait for the input for at least this number of
            seconds.
        already_s: Seconds that the command took before the run: interpreter, imports, job file.

    Raises:
        UsageError: A value is invalid.
    """

    limit: int | None = None
    replace: bool = False
    retry_errors: bool = False
    verify: bool = False
    to_openai: Path | None = None
    openai_timestamps: bool = False
    engine: str = ENGINE
    price_per_hour: float | None = None
    stop_at: StopTime | None = None
    transport: Transport = PROCESSES
    standby: EngineStandby | None = None
    waves_from_s: float = 1.0
    already_s: float = 0.0

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
    """Return the error for an invalid argument of `batchinfer.run` or the command line.

    Args:
        name: Name of the argument, and of the option of the command line.
        value: The value that was passed.
        right: A description of valid values.
    """
    return UsageError(f"{name}: found {repr(value)[:80]}; it must be {right}")
