"""Parses times that a user gives: when results are needed (`deadline`), and when a run stops (`--stop-at`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from batchinfer.core.errors import UsageError
from batchinfer.core.wording import rough_duration

TIME_FORMATS = "a time of day such as 06:00, or a timestamp such as 2027-01-31T06:00"
_CLOCK = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True, slots=True)
class StopTime:
    """The time at which the user wants a run to stop.

    Attributes:
        text: The time as the user wrote it.
        at: The moment that the text means.
    """

    text: str
    at: datetime

    @classmethod
    def of(cls, text: str, now: datetime) -> StopTime:
        """Return the stop time that a user's text means.

        Args:
            text: A time of day (HH:MM), which means its next occurrence, or a timestamp.
            now: The current time, with a time zone.

        Raises:
            UsageError: The text is invalid, or the time has passed.
        """
        try:
            at = next_moment(text, now)
        except (ValueError, OverflowError):
            raise UsageError(f"stop_at (--stop-at): found {text[:80]!r}; it must be {TIME_FORMATS}") from None
        if at <= now:
            passed = rough_duration((now - at).total_seconds())
            raise UsageError(
                f"stop_at (--stop-at): {text} was {passed} ago; give a time in the future, or a time of day such as "
                "06:00, which is its next occurrence"
            )
        return cls(text, at)

    @property
    def recurs(self) -> bool:
        """Return True if the user gave a time of day (HH:MM). On another day, the same text means another moment."""
        return _CLOCK.fullmatch(self.text) is not None


def next_moment(text: str, now: datetime) -> datetime:
    """Return the moment that a text means. A time of day (HH:MM) means its next occurrence.

    Args:
        text: A time of day (HH:MM) by the machine's clock, or a timestamp. A timestamp without a zone is local.
        now: The current time, with a time zone.

    Raises:
        ValueError or OverflowError: The text is neither.
    """
    clock = _CLOCK.fullmatch(text)
    if clock is None:
        return datetime.fromisoformat(_timestamp(text)).astimezone()
    today = now.astimezone().replace(tzinfo=None)
    at = today.replace(hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0)
    todays = (at.replace(fold=fold).astimezone() for fold in (0, 1))  # by the zone's rules of that day
    tomorrows = (at + timedelta(days=1)).astimezone()
    return next((moment for moment in todays if moment > now), tomorrows)


def _timestamp(text: str) -> str:
    # A bare date is refused: few users mean midnight at its start
    if not re.match(r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}", text):
        raise ValueError(f"no time of day and no timestamp: {text}")
    return text
