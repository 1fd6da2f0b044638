"""How a process goes on with a connection to a node that another process has opened."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WireEnd:
    """An end is what goes on with a wire: its descriptor's number, the keys under which messages are signed, and how
    many were under each."""

    descriptor: int
    sending: bytes
    receiving: bytes
    sent: int
    received: int
