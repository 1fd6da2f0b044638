"""The store through which ranks on several machines find each other: each tells all others where it listens."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch._C import _distributed_c10d as c10d

from batchinfer.engine.ranks.seat import Exchange


class ToldStore(c10d.Store):
    """A store of torch's that holds what ranks tell each other, for the time in which they meet. Values are set once,
    and whoever asks for one that is not there yet waits until it is told."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Tell the others."""
        told = value.encode() if isinstance(value, str) else bytes(value)
        self._known[key] = told
        self._exchange.tell(key, told)

    def get(self, key: str) -> bytes:
        """Return what was told, once it was."""
        while key not in self._known:
            name, value = self._exchange.hear()
            self._known[name] = value
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all were told, for as long as it takes: whoever watches the engine decides how long."""
        for key in keys:
            self.get(key)
