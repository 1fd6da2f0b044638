"""The leading rank's end of the others of its engine: it starts them, tells them what to do, and ends with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from batchinfer.core.errors import OutOfMemory, Unavailable
from batchinfer.core.samples import RankUse
from batchinfer.engine.ranks.division import RankConfig
from batchinfer.machine.spawning import Child, Ended, receiving
from batchinfer.machine.waiting import Waited
from batchinfer.pipeline.workers.endings import Leave
from batchinfer.pipeline.workers.engine_entry import RANK
from batchinfer.pipeline.workers.heartbeat import BEAT_S, STARTING_S
from batchinfer.pipeline.workers.messages import Failed, Finish, Left, Loaded, Pulse, WorkerSpec
from batchinfer.pipeline.workers.ranks.meeting import Meeting, Parent

MISSED_S = 5 * BEAT_S  # that a rank may say nothing once it has
_OTHERS_S = 0.5  # so long after one rank has ended the others are heard: one of them may know why
_REAP_S = 5.0
_LEAVE_S = 10.0  # ranks that were told to leave and have not by then are left to the system, which ends them


class RollCall:
    """Notes when each rank was heard, until it has loaded. One thread may note while another one asks."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._lock = threading.Lock()
        self._waited = {rank: Waited(most_s=2 * BEAT_S) for rank in ranks}
        self._started: set[int] = set()

    def heard(self, rank: int) -> None:
        """Note that a rank has said something."""
        with self._lock:
            self._started.add(rank)
            if rank in self._waited:
                self._waited[rank].again()

    def done(self, rank: int) -> None:
        """Note that a rank has loaded: whether it is at work shows elsewhere."""
        with self._lock:
            self._waited.pop(rank, None)

    def silent(self) -> int | None:
        """Return a rank that has said nothing for too long; to be asked every BEAT_S seconds."""
        with self._lock:
            late = [rank for rank, waited in self._waited.items() if waited.look() > self._limit_s(rank)]
        return min(late, default=None)

    def _limit_s(self, rank: int) -> float:
        return MISSED_S if rank in self._started else STARTING_S


class OtherRanks:
    """The ranks from 1 on, a process each; as many as there are specifications, which may be none.

    A rank that ends before it is told to ends the engine: its parts of the weights and of the cache are gone. This
    process then tells the parent why and ends, whatever it is doing: it may wait for that rank for ever. The kernel
    ends the other ranks with it.
    """

    def __init__(self, spec: WorkerSpec, parent: Parent, leave: Leave) -> None:
        """Start the processes: they import what they need, and wait for the message to load. Raises OSError.

        Args:
            spec: The engine.
            parent: The connection to the parent.
            leave: Ends the engine at once, from any thread.
        """
        self._parent, self._leave, self._size = parent, leave, 1 + len(spec.others)
        self._changed = threading.Condition()
        self._loaded = 0
        self._roll_call = RollCall(range(1, self._size))
        self.peaks: list[int] = []  # bytes that each that has left held at most
        self.uses: list[RankUse] = []  # what each that has left had and took
        # of the layers of all stages; the ranks of a stage count the same
        self.expert_tokens: dict[int, list[int]] = {}
        self.rank_config: RankConfig | None = None  # of this process; None: there are no other ranks
        self._children: list[Child] = []
        self._sending = threading.Lock()
        self._meeting: Meeting | None = None
        if not spec.others:
            return
        self._meeting = meeting = Meeting(spec.division)
        self.rank_config = meeting.rank_config(0)
        for rank, other in enumerate(spec.others, 1):
            self._children.append(Child(RANK, other, meeting.rank_config(rank), files=meeting.files))
        threading.Thread(target=self._watch, daemon=True, name="ranks").start()

    def tell(self, message: object) -> None:
        """Send a message to all of them. Should one be gone, this process soon ends."""
        with self._sending:
            for child in self._children:
                with suppress(BrokenPipeError, ConnectionResetError):
                    child.connection.send(message)

    def silent(self) -> str:
        """Name a rank that loads and has said nothing for a while, whatever it does; "": none."""
        found = self._roll_call.silent()
        return "" if found is None else f"rank {found} of {self._size}"

    def await_loaded(self) -> None:
        """Wait until all have loaded their weights."""
        with self._changed:
            self._changed.wait_for(lambda: self._loaded == len(self._children))
        if self._meeting is not None:
            self._meeting.over()

    def finish(self) -> None:
        """Have them leave: nothing more is to be computed."""
        self.tell(Finish(0))
        with self._changed:
            self._changed.wait_for(lambda: len(self.peaks) == len(self._children), _LEAVE_S)

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Let an error that a lost rank may have caused be reported as that loss, if it is one."""
        try:
            yield
        except (EOFError, BrokenPipeError):  # the parent is gone
            raise
        except Exception:
            if self._children:
                time.sleep(4 * _OTHERS_S)  # by then `_watch` has ended this process
            raise

    def _watch(self) -> None:
        """Hear the ranks until one ends that was not to, or all have left."""
        left: set[int] = set()
        rank_of: dict[Any, int] = {child.connection: rank for rank, child in enumerate(self._children, 1)}
        while len(left) < len(rank_of):
            for connection in wait([one for one, rank in rank_of.items() if rank not in left]):
                rank = rank_of[connection]
                message = _heard(self._children[rank - 1])
                self._roll_call.heard(rank)
                if isinstance(message, Pulse):
                    if message.untimed:
                        self._roll_call.done(rank)
                elif isinstance(message, Loaded | Left):
                    self._note(message)
                    left |= {rank} if isinstance(message, Left) else set()
                else:
                    self._end(rank, message)

    def _note(self, message: Loaded | Left) -> None:
        with self._changed:
            if isinstance(message, Left):
                self.peaks.append(message.peak_rss)
                self.uses += message.ranks
                self.expert_tokens |= message.expert_tokens
            else:
                self._loaded += 1
            self._changed.notify_all()

    def _end(self, rank: int, failed: Failed | None) -> None:
        """Tell the parent which rank is lost, and end this process."""
        ends = [(rank, failed), *self._also_ended(rank)]
        with suppress(BrokenPipeError, ConnectionResetError):
            self._parent.send(min((self._told(*end) for end in ends), key=_rank_of_cause))
        self._leave(1)

    def _also_ended(self, first: int) -> Iterator[tuple[int, Failed | None]]:
        """Yield what the ranks say that end now, too: when one is killed, the others find that it is gone."""
        numbered: dict[Any, int] = {
            child.connection: rank for rank, child in enumerate(self._children, 1) if rank != first
        }
        time.sleep(_OTHERS_S)
        for connection in wait([*numbered], 0) if numbered else ():
            rank = numbered[connection]
            message = _heard(self._children[rank - 1])
            if message is None or isinstance(message, Failed):
                yield rank, message

    def _told(self, rank: int, failed: Failed | None) -> Failed:
        """Return what the parent hears of the end of a rank."""
        who = f"rank {rank} of {self._size}"
        if failed is not None:
            return replace(failed, message=f"{who}: {failed.message}")
        ended = self._children[rank - 1].wait(_REAP_S)
        return _death(f"{who} {'closed its connection' if ended is None else ended}", ended)


def _death(what: str, ended: Ended | None) -> Failed:
    memory = ended is not None and ended.out_of_memory
    return Failed((OutOfMemory if memory else Unavailable).exit_code, what, "", died=True)


def _rank_of_cause(failed: Failed) -> int:
    """Sort causes before what they cause: that a rank was killed, that it lacked memory, any other error."""
    return 0 if not failed.detail else 1 if failed.exit_code == OutOfMemory.exit_code else 2


def _heard(child: Child) -> Any:
    """Return the next message of a rank; None: it has ended."""
    try:
        with receiving():
            return child.connection.recv()
    except EOFError:
        return None
