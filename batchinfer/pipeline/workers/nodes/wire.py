"""A connection between a run and a node, on which each message is signed and numbered."""

from __future__ import annotations

import hmac
import json
import select
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from batchinfer.pipeline.workers.nodes.packing import packed, unpacked
from batchinfer.pipeline.workers.nodes.wire_end import WireEnd

MOST_BYTES = 1 << 30  # of a message
MOST_HELLO = 1 << 16  # of what is said before versions were compared
_HEAD = struct.Struct(">Q32s")  # the bytes of a message, and its signature
_NUMBERED = struct.Struct(
    ">QQ"
)  # what is signed before these: which message it is, and how many bytes it has
_PIECE = 1 << 20
# A machine that is switched off says nothing: after so many seconds without an answer the system ends the connection
_SILENT_S, _PROBE_S, _PROBES = 10, 5, 4


class Tampered(EOFError):
    """A message is not as its sender signed it: nothing of it was read."""


class Wire:
    """One end of a connection whose two ends have proved that they have the same token. Nothing is encrypted."""

    def __init__(
        self, link: socket.socket, sending: bytes, receiving: bytes, sent: int = 0, received: int = 0
    ) -> None:
        link.settimeout(None)
        _keep_alive(link)
        self._link, self._keys, self._counts = link, (sending, receiving), [sent, received]
        self._sending = threading.Lock()

    @classmethod
    def of(cls, end: WireEnd) -> Wire:
        """Go on with a wire whose descriptor this process has."""
        link = socket.socket(fileno=end.descriptor)
        return cls(link, end.sending, end.receiving, end.sent, end.received)

    def end(self) -> WireEnd:
        """Return what goes on with it in a process that gets its descriptor."""
        return WireEnd(self._link.fileno(), *self._keys, *self._counts)

    @property
    def own_address(self) -> str:
        """Return this end's address."""
        return str(self._link.getsockname()[0])

    def send(self, message: object) -> None:
        """Send a message. Raises BrokenPipeError or another OSError when the other end is gone."""
        self._send(packed(message))

    def recv(self) -> Any:
        """Return the next message, waiting for it. Raises EOFError when the other end is gone, and Tampered."""
        try:
            return unpacked(self._recv(MOST_BYTES))
        except ValueError as error:
            raise Tampered(f"a message cannot be read: {error}") from error

    def say(self, facts: Mapping[str, Any]) -> None:
        """Send what is understood whatever the versions of both ends are."""
        self._send(json.dumps(facts).encode())

    def hear(self, within_s: float) -> dict[str, Any]:
        """Return what the other end says so. Raises EOFError when it does not in time."""
        self._link.settimeout(within_s)
        try:
            found = json.loads(self._recv(MOST_HELLO))
        except (OSError, ValueError) as error:
            raise EOFError(f"the other end did not say what it is: {error}") from error
        finally:
            self._link.settimeout(None)
        if not isinstance(found, dict):
            raise EOFError("the other end did not say what it is")
        return found

    def poll(self, timeout_s: float) -> bool:
        """Whether there is something to receive, an end included; waits for it for so long."""
        ready = select.poll()
        ready.register(self._link, select.POLLIN)
        return bool(ready.poll(timeout_s * 1000))

    def fileno(self) -> int:
        """Return its descriptor, for those who wait for several."""
        return self._link.fileno()

    def stop_sending(self) -> None:
        """Let the other end see that nothing more comes; it may still send."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)

    def hang_up(self) -> None:
        """End the connection in both directions, also for who waits in `recv`."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back; safe to call twice. Another process that has the wire keeps it."""
        self._link.close()

    def _send(self, data: bytes) -> None:
        if len(data) > MOST_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is longer than {MOST_BYTES}")
        with self._sending:
            tag = self._tag(0, data)
            self._counts[0] += 1
            self._link.sendall(_HEAD.pack(len(data), tag))
            self._link.sendall(data)

    def _recv(self, most: int) -> bytes:
        length, tag = _HEAD.unpack(self._exactly(_HEAD.size))
        if length > most:
            raise Tampered(f"a message of {length} bytes is longer than {most}")
        data = self._exactly(length)
        if not hmac.compare_digest(tag, self._tag(1, data)):
            raise Tampered("a message is not as it was signed")
        self._counts[1] += 1
        return bytes(data)

    def _tag(self, direction: int, data: bytes | bytearray) -> bytes:
        signed = hmac.new(self._keys[direction], digestmod="sha256")
        signed.update(_NUMBERED.pack(self._counts[direction], len(data)))
        signed.update(data)
        return signed.digest()

    def _exactly(self, count: int) -> bytearray:
        """Receive so many bytes; memory is taken as they come."""
        found = bytearray()
        while len(found) < count:
            more = self._link.recv(min(_PIECE, count - len(found)))
            if not more:
                raise EOFError("the other end is gone")
            found += more
        return found


def _keep_alive(link: socket.socket) -> None:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": _SILENT_S, "TCP_KEEPINTVL": _PROBE_S, "TCP_KEEPCNT": _PROBES}
    options["TCP_USER_TIMEOUT"] = 1000 * (_SILENT_S + _PROBE_S * _PROBES)
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:
            link.setsockopt(socket.IPPROTO_TCP, option, value)
