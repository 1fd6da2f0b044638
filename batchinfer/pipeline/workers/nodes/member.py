"""A machine's part as a node: it joins a run, has the processes that the run wants there, and ends with the run."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from batchinfer.core.errors import Unavailable
from batchinfer.machine.spawning import receiving
from batchinfer.pipeline.workers.nodes.about import about_this
from batchinfer.pipeline.workers.nodes.handshake import WITHIN_S, WrongToken, prove
from batchinfer.pipeline.workers.nodes.offer import NodeOffer
from batchinfer.pipeline.workers.nodes.orders import RunOver, StartProcess
from batchinfer.pipeline.workers.nodes.relay import Relay
from batchinfer.pipeline.workers.nodes.wire import Wire

_AGAIN_S = 0.5
Address = tuple[str, int]


def serve(
    address: Address, token: bytes, offer: NodeOffer, tell: Callable[[str], None], wait_s: float
) -> None:
    """Join the run that listens at the address, and start what it orders until it is over. `wait_s`: for so many
    seconds it waits for a run, and, where that has all its nodes, for the loss of one. `tell` gets a line for what a
    user should know.

    Raises WrongToken where the run has another one, and Unavailable where no run listens, where it does not take this
    node, and when it is gone before it has said that it is over.
    """
    wire = _joined(address, token, tell, wait_s)
    if wire is None:
        tell("the run is over, and had no need of this node")
        return
    relays: list[Relay] = []
    known: dict[str, str] = {}
    try:
        while not isinstance(message := _heard(wire, address), RunOver):
            assert isinstance(message, StartProcess)
            relays = [relay for relay in relays if not relay.over]
            relays.append(Relay(message, _channel(address, token, message.channel), offer, known))
        tell("the run is over")
    finally:
        wire.hang_up()
        for relay in relays:
            relay.end()


def _heard(wire: Wire, address: Address) -> Any:
    try:
        with receiving():
            message = wire.recv()
    except EOFError as error:
        raise Unavailable(
            f"the run at {_shown(address)} is gone: {error}; its processes here are ended"
        ) from error
    if not isinstance(message, RunOver | StartProcess):
        raise Unavailable(f"the run at {_shown(address)} sent {type(message).__name__}, which is no order")
    return message


def _channel(address: Address, token: bytes, channel: str) -> Wire:
    """Open the connection of a process."""
    try:
        return _opened(address, token, {"channel": channel})
    except OSError as error:
        raise Unavailable(f"the run at {_shown(address)} is gone: {error}") from error


def _joined(address: Address, token: bytes, tell: Callable[[str], None], wait_s: float) -> Wire | None:
    """Return the connection to a run that has taken this node; None: that run is over, and had no need of it."""
    deadline, told = time.monotonic() + wait_s, False
    while True:
        try:
            wire = _opened(address, token, about_this())
            answer = _answer(wire, address, tell, deadline)
            break
        except WrongToken:
            raise
        except (Unavailable, OSError, EOFError) as error:
            if time.monotonic() >= deadline:
                text = f"no run has taken this node at {_shown(address)} within {wait_s:.0f} s: {error}"
                raise Unavailable(text) from error
        if not told:
            tell(f"waiting for a run at {_shown(address)}")
            told = True
        time.sleep(_AGAIN_S)
    if answer.get("welcome") is True:
        tell(f"joined the run at {_shown(address)} as node {answer.get('number')} of {answer.get('count')}")
        return wire
    wire.close()
    if answer.get("over") is True:
        return None
    raise Unavailable(f"the run at {_shown(address)} does not take this node: {answer.get('why')}")


def _answer(wire: Wire, address: Address, tell: Callable[[str], None], deadline: float) -> dict[str, Any]:
    """Return what the run says to this node, which may have to wait until another one is lost. Raises EOFError when it
    says nothing, or is gone, and Unavailable when it has all its nodes until the deadline."""
    full = False
    try:
        answer = wire.hear(WITHIN_S)
        full = answer.get("full") is True
        if full:
            tell(f"the run at {_shown(address)} has all its nodes; this one waits for one to be lost")
            answer = wire.hear(max(0.0, deadline - time.monotonic()))
    except EOFError as error:
        wire.close()
        if full and time.monotonic() >= deadline:
            raise Unavailable("it has all its nodes") from error
        raise
    return answer


def _opened(address: Address, token: bytes, said: dict[str, str]) -> Wire:
    """Open a connection, and say what it is for. Raises WrongToken, Unavailable and OSError."""
    link = socket.create_connection(address, timeout=WITHIN_S)
    try:
        wire = Wire(link, *prove(link, token, "node"))
        wire.say(said)
    except BaseException:
        link.close()
        raise
    return wire


def _shown(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
