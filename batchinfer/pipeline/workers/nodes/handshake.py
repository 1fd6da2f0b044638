"""How a run and a node show each other that they have the same token, before anything is read of what they send.

Each sends 32 random bytes, and answers those of the other by an HMAC-SHA256 under the token of both: first the run, so
that a node says nothing to whoever else listens there. What they send afterwards is signed by keys that follow from the
token and from these bytes: no other connection has them.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from typing import Literal

from batchinfer.core.errors import SecurityRefusal, Unavailable

Side = Literal["run", "node"]
WITHIN_S = 10.0  # from the connection to the last proof
MAGIC = b"batchinfer node 1\n"
SECRET = 32  # bytes of a challenge, and of a proof


class WrongToken(SecurityRefusal):
    """The other side has another token, or none."""


def prove(link: socket.socket, token: bytes, side: Side, within_s: float = WITHIN_S) -> tuple[bytes, bytes]:
    """Return the keys under which this side sends and receives, once both have proved that they have the token.

    Raises WrongToken where the other one does not, and Unavailable where it is no node or run of batchinfer, or says
    too little for too long.
    """
    deadline, own = time.monotonic() + within_s, secrets.token_bytes(SECRET)
    if side == "node":
        link.sendall(MAGIC + own)
        _expect_magic(link, deadline)
        theirs = _exactly(link, SECRET, deadline)
        challenges = own + theirs
        _check_proof(_exactly(link, SECRET, deadline), token, "run", challenges)
        link.sendall(_signed(token, b"node", challenges))
        _expect_accepted(link, deadline)
    else:
        _expect_magic(link, deadline)
        challenges = _exactly(link, SECRET, deadline) + own
        link.sendall(MAGIC + own + _signed(token, b"run", challenges))
        _check_proof(_exactly(link, SECRET, deadline), token, "node", challenges)
        link.sendall(MAGIC)
    keys = {one: _signed(token, b"frames of the " + one.encode(), challenges) for one in ("run", "node")}
    return keys[side], keys["node" if side == "run" else "run"]


def _signed(token: bytes, what: bytes, challenges: bytes) -> bytes:
    return hmac.digest(token, what + b"\n" + challenges, "sha256")


def _check_proof(proof: bytes, token: bytes, side: Side, challenges: bytes) -> None:
    if not hmac.compare_digest(proof, _signed(token, side.encode(), challenges)):
        raise WrongToken(f"the {side} at the other end has another token")


def _expect_magic(link: socket.socket, deadline: float) -> None:
    if _exactly(link, len(MAGIC), deadline) != MAGIC:
        raise Unavailable("what answers there is no batchinfer of this version")


def _expect_accepted(link: socket.socket, deadline: float) -> None:
    try:
        _expect_magic(link, deadline)
    except Unavailable as error:
        raise WrongToken("the run did not accept the token") from error


def _exactly(link: socket.socket, count: int, deadline: float) -> bytes:
    """Receive so many bytes. Raises Unavailable when they do not come in time."""
    found = b""
    while len(found) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise Unavailable("the other end did not prove in time that it has the token")
        link.settimeout(left)
        try:
            more = link.recv(count - len(found))
        except OSError as error:
            raise Unavailable(f"the connection ended before it was proved who speaks: {error}") from error
        if not more:
            raise Unavailable("the connection was closed before it was proved who speaks")
        found += more
    return found
