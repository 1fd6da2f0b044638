"""How ranks on several machines learn where the others listen: the leading rank passes on what each tells."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue

from batchinfer.machine.spawning import receiving
from batchinfer.pipeline.workers.messages import ListensAt
from batchinfer.pipeline.workers.ranks.parent import Parent


class LeadingExchange:
    """The leading rank's end: `tell_all` sends a message to all others."""

    def __init__(self, tell_all: Callable[[ListensAt], None]) -> None:
        self._tell_all, self._heard = tell_all, SimpleQueue[ListensAt]()

    def tell(self, key: str, value: bytes) -> None:
        """Tell the others."""
        self._tell_all(ListensAt(key, value))

    def told(self, message: ListensAt) -> None:
        """Take note of what another rank tells, which was passed on."""
        self._heard.put(message)

    def hear(self) -> tuple[str, bytes]:
        """Return what another rank tells. Should one be gone, this process ends meanwhile."""
        message = self._heard.get()
        return message.key, message.value


class FollowingExchange:
    """The end of a rank that follows, which receives nothing else before it has met the others."""

    def __init__(self, connection: Parent) -> None:
        self._connection = connection

    def tell(self, key: str, value: bytes) -> None:
        """Tell the leading rank, which tells the others."""
        self._connection.send(ListensAt(key, value))

    def hear(self) -> tuple[str, bytes]:
        """Return what another rank tells. Raises EOFError when the leading rank is gone."""
        with receiving():
            message = self._connection.recv()
        if not isinstance(message, ListensAt):
            raise EOFError(f"{type(message).__name__} was sent before the ranks had met")
        return message.key, message.value
