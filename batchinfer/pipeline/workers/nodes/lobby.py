"""The place where nodes join a run, which listens at the address that its job names, and nowhere else."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from batchinfer.core.errors import BatchInferError, Unavailable
from batchinfer.pipeline.workers.nodes.about import about_this, differing
from batchinfer.pipeline.workers.nodes.handshake import WITHIN_S, prove
from batchinfer.pipeline.workers.nodes.node import JoinedNode
from batchinfer.pipeline.workers.nodes.wire import Wire

_STRANGERS = 32  # connections at a time that have not proved who they are
_TOLD = 5  # of these, that a user hears of: anybody may connect as often as he likes


class Lobby:
    """Listens for nodes until it is left as a context manager, which tells them that the run is over.

    Whoever connects has to prove that it has the token before anything is read of what it sends. `count`: nodes that
    the job has; while all are there, others wait. The number of a node that is lost goes to one of these, or to the
    next that joins. `notice` gets a line for each that joins, is refused, or is lost.
    """

    def __init__(
        self, address: tuple[str, int], token: bytes, count: int, notice: Callable[[str], None]
    ) -> None:
        """Raises Unavailable where nothing can listen at the address."""
        self.address, self._token, self._count, self._notice = address, token, count, notice
        self.host = address[0]
        self._nodes: dict[int, JoinedNode] = {}
        self._spares: deque[tuple[Wire, str]] = deque()
        self._changed = threading.Condition()
        self._strangers = threading.Semaphore(_STRANGERS)
        self._told = 0
        self._over = False
        try:
            self._listener = socket.create_server(address, backlog=_STRANGERS)
        except OSError as error:
            raise Unavailable(
                f"engine.nodes.listen: nothing can listen at {address[0]}:{address[1]}: {error}"
            ) from error
        threading.Thread(target=self._accept, daemon=True, name="nodes").start()

    def __enter__(self) -> Lobby:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, and let the nodes go."""
        with self._changed:
            self._over = True
        # closing alone would leave the thread in `accept`
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for node in self.joined:
            node.over()
        for wire, _ in self._spares:  # nobody adds to them any more
            with suppress(OSError):
                wire.say({"welcome": False, "over": True})
            wire.close()

    @property
    def joined(self) -> list[JoinedNode]:
        """Return the last node of each number that has joined, also if it is gone."""
        with self._changed:
            return [*self._nodes.values()]

    def node(self, number: int, within_s: float, waiting: Callable[[], None]) -> JoinedNode:
        """Return the node of that number, once so many have joined. `waiting` is called now and then. Raises
        Unavailable where they have not within so many seconds."""
        deadline = time.monotonic() + within_s
        while True:
            with self._changed:
                if number in self._nodes or self._changed.wait_for(lambda: number in self._nodes, 0.1):
                    return self._nodes[number]
                have = len(self._nodes)
            waiting()
            if time.monotonic() >= deadline:
                raise Unavailable(
                    f"{have} of {self._count} nodes have joined at {self.host}:{self.address[1]} within "
                    f"{within_s:.0f} s (engine.nodes.wait_s); start on each: batchinfer worker --join "
                    f"{self.host}:{self.address[1]} --token-file FILE"
                )

    def _accept(self) -> None:
        while True:
            try:
                link, peer = self._listener.accept()
            except OSError:
                return  # closed
            if not self._strangers.acquire(blocking=False):
                link.close()
                continue
            threading.Thread(target=self._greet, args=(link, peer[0]), daemon=True, name="stranger").start()

    def _greet(self, link: socket.socket, peer: str) -> None:
        try:
            wire = Wire(link, *prove(link, self._token, "run"))
            said = wire.hear(WITHIN_S)
        except (BatchInferError, OSError, EOFError) as error:
            link.close()
            self._refused(f"a connection from {peer} was refused: {error}")
            return
        finally:
            self._strangers.release()
        try:
            self._welcome(wire, said, peer)
        except OSError as error:
            wire.close()
            self._refused(f"a node at {peer} has left before it was answered: {error}")

    def _welcome(self, wire: Wire, said: dict[str, object], peer: str) -> None:
        channel = said.get("channel")
        if isinstance(channel, str):
            if not any(node.arrived(channel, wire) for node in self.joined):
                wire.close()
            return
        why = differing(about_this(), said)
        if why:
            wire.say({"welcome": False, "why": why})
            wire.close()
            self._refused(f"a node at {peer} ({str(said.get('host'))[:80]}) was sent away: {why}")
            return
        with self._changed:
            told = self._take_in(wire, f"{str(said['host'])[:80]}, {peer}")
        if told:
            self._notice(told)

    def _take_in(self, wire: Wire, name: str) -> str:
        """Give a node the first number that is free, or let it wait for one, and return the line for the user; to be
        called with the lock. Raises OSError when the node has left."""
        if self._over:
            wire.say({"welcome": False, "why": "the run is over"})
            wire.close()
            return ""
        self._drop_left()
        number = self._free
        if number is None:
            wire.say({"welcome": False, "full": True})
            self._spares.append((wire, name))
            return f"another node ({name}) waits for one to be lost: engine.nodes.count is {self._count}"
        return self._seat(number, wire, name)

    @property
    def _free(self) -> int | None:
        """Return the first number that no node has, or one that is gone."""
        free = (n for n in range(1, self._count + 1) if n not in self._nodes or self._nodes[n].gone)
        return next(free, None)

    def _seat(self, number: int, wire: Wire, name: str) -> str:
        """Give a node this number, and return the line for the user. Raises OSError when the node has left."""
        wire.say({"welcome": True, "number": number, "count": self._count})
        node = self._nodes[number] = JoinedNode(number, name, wire, self._lost)
        self._changed.notify_all()
        return f"{node} of {self._count} has joined"

    def _drop_left(self) -> None:
        """Forget nodes that waited and have left: they say nothing, so that what is to be received is their end."""
        for one in [one for one in self._spares if one[0].poll(0)]:
            self._spares.remove(one)
            one[0].close()

    def _refused(self, text: str) -> None:
        with self._changed:
            self._told += 1
            told, over = self._told, self._over
        if told <= _TOLD and not over:
            self._notice(text)

    def _lost(self, node: JoinedNode) -> None:
        with self._changed:
            over = self._over
            told = "" if over else self._call_spare()
        for text in (f"{node} is gone", told):
            if text and not over:
                self._notice(text)

    def _call_spare(self) -> str:
        """Give the number of a lost node to one that waits, if there is one, and return the line for the user; to be
        called with the lock."""
        self._drop_left()
        while self._spares and (number := self._free) is not None:
            wire, name = self._spares.popleft()
            try:
                return self._seat(number, wire, name)
            except OSError:
                wire.close()
        return ""
