"""When a job's results are wanted."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

_CLOCK = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")


def deadline_after(text: str, now: datetime) -> datetime:
    """The moment that `text` means at `now`, which has a time zone.

    HH:MM is the next such time by the machine's clock, tomorrow's if today's is past; of an hour that comes twice the
    first time that is not past. A timestamp without a zone is local, too. Raises ValueError for another text.
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
    """A bare date would be midnight at its start, which few mean."""
    if not re.match(r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}", text):
        raise ValueError(f"no time of day and no timestamp: {text}")
    return text
