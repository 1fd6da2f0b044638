"""What a run and its nodes say to each other: who speaks is proved first, each message is signed, and reading one makes
nothing but messages."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.core.errors import BatchInferError, InputMissing, SecurityRefusal, Unavailable
from batchinfer.core.request import Output, Tokens
from batchinfer.engine.config import LoadConfig
from batchinfer.engine.ranks.seat import Exchange
from batchinfer.pipeline.workers.messages import Add, EnginePlace, Failed, Finish, Loaded, WorkerSpec
from batchinfer.pipeline.workers.nodes import packing
from batchinfer.pipeline.workers.nodes.about import about_this
from batchinfer.pipeline.workers.nodes.handshake import MAGIC, SECRET, WrongToken, prove
from batchinfer.pipeline.workers.nodes.lobby import Lobby
from batchinfer.pipeline.workers.nodes.member import serve
from batchinfer.pipeline.workers.nodes.node_transport import FailedLink, NodeTransport
from batchinfer.pipeline.workers.nodes.offer import NodeOffer
from batchinfer.pipeline.workers.nodes.orders import RunOver
from batchinfer.pipeline.workers.nodes.packing import packed, unpacked
from batchinfer.pipeline.workers.nodes.token import read_token
from batchinfer.pipeline.workers.nodes.wire import Tampered, Wire
from tests.examples import examples
from tests.patience import wait_until

LOAD = LoadConfig(Path("m"), "float32", "cpu")

TOKEN = b"a secret of thirty-two bytes, or more"
TEXTS = st.text(st.characters(exclude_categories=()), max_size=5)  # with lone surrogates, as paths have
PLAIN: Mapping[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**70), 2**70), float: st.floats(allow_nan=False), str: TEXTS, bytes: st.binary(max_size=9),
    bool: st.booleans(), type(None): st.none(),
    Path: TEXTS.filter(lambda text: "\0" not in text).map(Path), Exchange: st.none(),
}  # fmt: skip


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Anything that a field of this type may hold."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if kind is Output:
        return values(Tokens)
    if origin in (Union, UnionType):
        return st.one_of(*map(values, parts))
    if origin is Literal:
        return st.sampled_from(parts)
    if origin is np.ndarray:
        return arrays(np.dtype(scalar_of(parts[1])))
    if origin in (list, Sequence):
        return st.lists(values(parts[0]), max_size=2)
    if origin is Mapping:
        return st.dictionaries(values(parts[0]), values(parts[1]), max_size=2)
    if origin is tuple and len(parts) == 2 and parts[1] is Ellipsis:
        return st.lists(values(parts[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, parts))
    if origin is None and kind.__name__ in packing._classes():
        hints = get_type_hints(kind)
        return st.builds(kind, **{name: values(hint) for name, hint in hints.items() if name != "others"})
    raise AssertionError(f"the test knows no values of {kind}")


def scalar_of(kind: Any) -> Any:
    """The type of an array's values; of floats of any size, float64."""
    found = get_args(kind)[0]
    return np.float64 if found is Any or get_origin(found) is not None else found


def arrays(kind: np.dtype[Any]) -> st.SearchStrategy[Any]:
    shapes = st.lists(st.integers(0, 3), max_size=2).map(tuple)
    return shapes.map(lambda shape: np.arange(np.prod(shape, dtype=int)).astype(kind).reshape(shape))


def same(a: Any, b: Any) -> bool:
    """Whether two values are of one type and alike, whatever compares them."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and (a == b).all())
    if is_dataclass(a):
        return all(same(getattr(a, one.name), getattr(b, one.name)) for one in fields(a))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@settings(max_examples=examples(30, 300), deadline=None)
@given(st.sampled_from(packing._ROOTS).flatmap(values))
def test_messages_come_as_they_were_sent(message: Any) -> None:
    assert same(unpacked(packed(message)), message)


@settings(max_examples=examples(40, 600), deadline=None)
@given(st.sampled_from(packing._ROOTS).flatmap(values), st.data())
def test_bytes_that_are_no_message_are_refused_as_such(message: Any, data: st.DataObject) -> None:
    damaged = bytearray(packed(message))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ValueError):  # or it is another message
        unpacked(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))


@pytest.mark.parametrize("tree", [
    '{"os.system": ["true"]}', '{"Popen": ["true"]}', '{"dict": []}', '{"again": 0}', '{"again": -1}', '{"bytes": 9}',
    '{"bytes": -1}', '{"array": [0, "O", [0]]}', '{"array": [8, "<M8[s]", [1]]}', '{"scalar": ["V8", 1]}',
    '{"Finish": [1, 2]}', '{"Finish": [1], "Load": []}', "[" * 100_000, '{"array": [0, "<i4", [5]]}',
])  # fmt: skip
def test_nothing_else_is_made_of_what_is_sent(tree: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        unpacked(len(tree).to_bytes(8, "big") + tree.encode())


def test_what_rows_share_is_sent_once() -> None:
    from tests.batchinfer.engine.small_engine import request

    rows = [request(row, [1, 2, 3], 5, bad_words=("x" * 1000,)) for row in range(50)]
    shared = [type(one)(one.key, one.prompt, rows[0].params) for one in rows]
    assert len(packed(Add(shared))) < 12_000 < 50_000 < len(packed(Add(rows)))
    found = unpacked(packed(Add(shared))).requests
    assert all(one.params is found[0].params for one in found)
    found[0].prompt[0] = 7  # as those of a pipe, it can be written to


@contextmanager
def connected(*tokens: bytes) -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with one, other:
        yield one, other


@contextmanager
def wires() -> Iterator[tuple[Wire, Wire, socket.socket]]:
    """Two ends, and what carries the bytes of the first."""
    with connected() as (one, other), ThreadPoolExecutor() as pool:
        run = pool.submit(prove, other, TOKEN, "run")
        yield Wire(one, *prove(one, TOKEN, "node")), Wire(other, *run.result()), one


def test_both_ends_speak_and_other_keys_are_of_no_use() -> None:
    with wires() as (node, run, _):
        for sender, receiver in ((node, run), (run, node), (run, node)):
            sender.send(Finish(1.5))
            assert receiver.recv() == Finish(1.5)
        node.say({"a": 1})
        assert run.hear(5.0) == {"a": 1}
        run._keys = run._keys[::-1]
        run.send(Finish(1.5))
        with pytest.raises(Tampered):
            node.recv()


@pytest.mark.parametrize("what", ["changed", "repeated", "left out", "too long"])
def test_messages_that_were_tampered_with_are_not_read(what: str) -> None:
    with wires() as (node, run, link):
        sent: list[bytes] = []
        caught = type("Caught", (), {"sendall": lambda _, data: sent.append(data)})()
        node._link = caught
        for one in (1.0, 2.0):
            node.send(Finish(one))
        first, second = b"".join(sent[:2]), b"".join(sent[2:])
        if what == "changed":
            link.sendall(first[:-1] + bytes([first[-1] ^ 1]))
        elif what == "left out":
            link.sendall(second)
        elif what == "repeated":
            link.sendall(first + first)
            assert run.recv() == Finish(1.0)
        else:
            link.sendall((1 << 40).to_bytes(8, "big") + first[8:])
        with pytest.raises(Tampered):
            run.recv()


def test_another_token_is_found_out_by_both() -> None:
    with connected() as (one, other), ThreadPoolExecutor() as pool:
        run = pool.submit(prove, other, TOKEN, "run", 5.0)
        with pytest.raises(WrongToken, match="the run at the other end has another token"):
            prove(one, TOKEN + b"x", "node", 5.0)
        one.close()
        with pytest.raises(Unavailable):
            run.result()


def test_who_does_not_know_the_token_is_not_accepted() -> None:
    """Also not one who sends back what he is sent."""
    for answer in (b"\0" * SECRET, None):
        with connected() as (one, other), ThreadPoolExecutor() as pool:
            run = pool.submit(prove, other, TOKEN, "run", 5.0)
            one.sendall(MAGIC + b"\1" * SECRET)
            heard = b""
            while len(heard) < len(MAGIC) + 2 * SECRET:
                heard += one.recv(1024)
            one.sendall(heard[-SECRET:] if answer is None else answer)
            with pytest.raises(WrongToken):
                run.result()


def test_who_says_little_is_given_up() -> None:
    with connected() as (one, other), ThreadPoolExecutor() as pool:
        run, began = pool.submit(prove, other, TOKEN, "run", 0.5), time.monotonic()
        while not run.done():
            one.sendall(b"b")
            time.sleep(0.05)
        with pytest.raises(Unavailable, match=r"in time|before it was proved"):
            run.result()
        assert time.monotonic() - began < 5.0


@pytest.mark.parametrize(("mode", "text", "refusal"), [
    (0o644, "f" * 48, SecurityRefusal), (0o640, "f" * 48, SecurityRefusal), (0o602, "f" * 48, SecurityRefusal),
    (0o600, "f" * 31 + "\n \n", SecurityRefusal), (0o600, "f" * 5000, SecurityRefusal), (0o600, None, InputMissing),
])  # fmt: skip
def test_a_token_that_is_no_secret_is_refused(
    tmp_path: Path, mode: int, text: str | None, refusal: type[BatchInferError]
) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(refusal, match=str(path)):
        read_token(path)


def test_a_token_is_read_without_its_line_end(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text("f" * 32 + "\n")
    assert read_token(path) == b"f" * 32
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_strangers_are_refused_and_none_keeps_nodes_from_joining() -> None:
    """More of them than are heard at a time; the user hears of some."""
    said: list[str] = []
    with Lobby(("127.0.0.1", 0), TOKEN, 1, said.append) as lobby:
        address = lobby._listener.getsockname()
        silent = [socket.create_connection(address) for _ in range(20)]
        for text in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", MAGIC):
            with socket.create_connection(address) as stranger:
                stranger.sendall(text)
        with socket.create_connection(address) as link:
            node = Wire(link, *prove(link, TOKEN, "node"))
            node.say({"batchinfer": "0", "host": "h" * 1000})
            answer = node.hear(5.0)
        assert answer["welcome"] is False
        assert "batchinfer 0, and" in answer["why"]
        for one in silent:
            one.close()
        wait_until(lambda: len(said) == 5)
        assert not lobby.joined
        assert all("was refused" in line or "was sent away" in line for line in said)
        assert max(map(len, said)) < 500


def asking(lobby: Lobby) -> Wire:
    """Ask to join as a node of this version, and return the connection."""
    link = socket.create_connection(lobby._listener.getsockname())
    wire = Wire(link, *prove(link, TOKEN, "node"))
    wire.say(about_this())
    return wire


@settings(max_examples=examples(10, 100), deadline=None)
@given(st.lists(st.sampled_from(["joins", "leaves", "spare leaves"]), max_size=12), st.integers(1, 3))
def test_the_place_of_a_lost_node_is_the_next_one_s(events: list[str], count: int) -> None:
    """Those that came first are first; one that is no longer there is passed over."""
    seats: dict[int, Wire] = {}
    every: list[Wire] = []
    spares: list[Wire] = []
    with Lobby(("127.0.0.1", 0), TOKEN, count, lambda _: None) as lobby:

        def seated(wire: Wire, answer: dict[str, Any]) -> None:
            number = min({*range(1, count + 1)} - {*seats})
            assert answer == {"welcome": True, "number": number, "count": count}
            seats[number] = wire

        for event in [*["joins"] * count, *events]:
            if event == "joins":
                every.append(wire := asking(lobby))
                answer = wire.hear(5.0)
                if answer.get("full"):
                    assert len(seats) == count
                    spares.append(wire)
                else:
                    seated(wire, answer)
            elif event == "spare leaves" and spares:
                spares.pop(0).hang_up()
            elif event == "leaves" and seats:
                lost = max(seats)
                seats.pop(lost).hang_up()
                if spares:
                    seated(spares[0], spares[0].hear(5.0))
                    del spares[0]
                else:
                    wait_until(lambda: lost in {node.number for node in lobby.joined if node.gone})  # noqa: B023
        wait_until(lambda: {node.number for node in lobby.joined if not node.gone} == {*seats})
    for spare in spares:
        assert spare.hear(5.0) == {"welcome": False, "over": True}
    for wire in seats.values():
        assert isinstance(wire.recv(), RunOver)
    for wire in every:
        wire.close()


@pytest.mark.parametrize("over", [True, False])
def test_a_node_that_is_not_needed_ends_with_the_run_or_when_it_has_waited(over: bool) -> None:
    said: list[str] = []
    with ThreadPoolExecutor() as pool, Lobby(("127.0.0.1", 0), TOKEN, 1, lambda _: None) as lobby:
        taken, address = asking(lobby), lobby._listener.getsockname()
        assert taken.hear(5.0)["welcome"] is True
        node = pool.submit(
            serve, address, TOKEN, NodeOffer("here", 1 << 30), said.append, 60.0 if over else 0.5
        )
        wait_until(lambda: any("waits for one to be lost" in line for line in said))
        if over:
            lobby.close()
            node.result(5.0)
            assert said[-1] == "the run is over, and had no need of this node"
        else:
            with pytest.raises(Unavailable, match=r"within 0 s: it has all its nodes"):
                node.result(5.0)
        taken.close()


def test_a_worker_has_lost_its_node_also_when_another_one_has_its_number_already() -> None:
    """Its rows would be blamed else, and the start of another worker be one try too many."""
    lines, worker = list[str](), WorkerSpec(LOAD, None, place=EnginePlace(node=1))
    with Lobby(("127.0.0.1", 0), TOKEN, 1, lines.append) as lobby:
        transport = NodeTransport(lobby, 5.0, lambda: None, dict)
        first = asking(lobby)
        assert first.hear(5.0)["welcome"] is True
        left, spare = asking(lobby), asking(lobby)
        assert [one.hear(5.0)["welcome"] for one in (left, spare)] == [False, False]
        link: Any = FailedLink("")
        transport._nodes[link] = lobby.joined
        assert not transport.lost(link)
        left.close()  # it is not called
        first.close()
        assert spare.hear(5.0)["welcome"] is True
        assert transport.lost(link)
        assert transport.missing(worker) == ""
        wait_until(lambda: len(lines) == 5)
    assert lines[3].endswith("is gone")
    assert lines[4].endswith("of 1 has joined")
    spare.close()


def test_two_threads_may_send_at_a_time() -> None:
    with wires() as (node, run, _):
        text = "x" * 300_000

        def send() -> None:
            for at in range(20):
                node.send(Failed(at, text, ""))
                node.send(Loaded(1.0))

        threads = [threading.Thread(target=send) for _ in range(3)]
        for thread in threads:
            thread.start()
        found = [run.recv() for _ in range(120)]
        for thread in threads:
            thread.join()
        assert sum(isinstance(one, Loaded) for one in found) == 60
