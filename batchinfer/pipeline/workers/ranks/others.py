"""The other ranks of an engine, as rank 0 sees them: it starts them, sends them commands, and ends with them."""

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
from batchinfer.machine.spawning import Child, ChildExit, receiving
from batchinfer.machine.waiting import WaitTimer
from batchinfer.pipeline.workers.endings import Leave
from batchinfer.pipeline.workers.engine_entry import RANK
from batchinfer.pipeline.workers.heartbeat import BEAT_S, STARTING_S
from batchinfer.pipeline.workers.messages import Failed, Finish, HeartbeatMessage, Left, Loaded, WorkerSpec
from batchinfer.pipeline.workers.ranks.rendezvous import ParentConnection, RendezvousFile

MISSED_S = 5 * BEAT_S  # limit on the time between heartbeats of a rank
_OTHERS_S = 0.5  # how long to wait after the end of a rank for messages of others, which may explain it
_REAP_S = 5.0
_LEAVE_S = 10.0  # how long to wait for ranks to leave; after that they end with this process


class HeartbeatWatch:
    """Records when each rank of an engine has sent its last message, and finds silent ranks, while the ranks load.

    May be used from several threads.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._lock = threading.Lock()
        self._waited = {rank: WaitTimer(most_s=2 * BEAT_S) for rank in ranks}
        self._started: set[int] = set()

    def record_message(self, rank: int) -> None:
        """Record that a rank has sent a message now."""
        with self._lock:
            self._started.add(rank)
            if rank in self._waited:
                self._waited[rank].reset()

    def stop_watching(self, rank: int) -> None:
        """Stop watching a rank that has loaded. From then on, the driver watches the engine as a whole."""
        with self._lock:
            self._waited.pop(rank, None)

    def find_silent(self) -> int | None:
        """Return the lowest number of a rank that has sent no message for too long, or None if there is none.

        Call it every BEAT_S (1) seconds.
        """
        with self._lock:
            late = [rank for rank, waited in self._waited.items() if waited.update() > self._limit_s(rank)]
        return min(late, default=None)

    def _limit_s(self, rank: int) -> float:
        return MISSED_S if rank in self._started else STARTING_S


class OtherRanks:
    """Starts the processes of all ranks of an engine except rank 0, and exchanges messages with them. Used by rank 0.

    If a rank ends unexpectedly, rank 0 sends the cause to the driver and ends immediately, and the operating system
    ends the remaining ranks with it. For an engine with one rank, all methods do nothing.
    """

    def __init__(self, spec: WorkerSpec, parent: ParentConnection, leave: Leave) -> None:
        """Start the processes of the other ranks. They import libraries and wait for a Load message.

        Args:
            spec: The specification of rank 0. Its `others` are the specifications of the other ranks.
            parent: The connection to the driver.
            leave: Ends rank 0 immediately. Must be callable from any thread.

        Raises:
            OSError: A process cannot be started.
        """
        self._parent, self._leave, self._size = parent, leave, 1 + len(spec.others)
        self._changed = threading.Condition()
        self._loaded = 0
        self._watch = HeartbeatWatch(range(1, self._size))
        self.peaks: list[int] = []  # peak memory in bytes of ranks that have left
        self.uses: list[RankUse] = []  # usage of ranks that have left
        # By layer of all stages; the ranks of a stage count the same tokens
        self.expert_tokens: dict[int, list[int]] = {}
        self.rank_config: RankConfig | None = None  # of this process, or None without other ranks
        self._children: list[Child] = []
        self._sending = threading.Lock()
        self._rendezvous: RendezvousFile | None = None
        if not spec.others:
            return
        self._rendezvous = rendezvous = RendezvousFile(spec.division)
        self.rank_config = rendezvous.rank_config(0)
        for rank, other in enumerate(spec.others, 1):
            self._children.append(Child(RANK, other, rendezvous.rank_config(rank), files=rendezvous.files))
        threading.Thread(target=self._receive_all, daemon=True, name="ranks").start()

    def send(self, message: object) -> None:
        """Send a message to all other ranks. A rank that has ended is skipped, because rank 0 will end soon, too."""
        with self._sending:
            for child in self._children:
                with suppress(BrokenPipeError, ConnectionResetError):
                    child.connection.send(message)

    def silent_rank(self) -> str:
        """Return the name of a rank that loads and has sent no message for too long, or "" if there is none."""
        found = self._watch.find_silent()
        return "" if found is None else f"rank {found} of {self._size}"

    def await_loaded(self) -> None:
        """Wait until all other ranks have loaded their weights."""
        with self._changed:
            self._changed.wait_for(lambda: self._loaded == len(self._children))
        if self._rendezvous is not None:
            self._rendezvous.remove_folder()

    def finish(self) -> None:
        """Tell all other ranks to end, and wait for their last messages for at most 10 seconds."""
        self.send(Finish(0))
        with self._changed:
            self._changed.wait_for(lambda: len(self.peaks) == len(self._children), _LEAVE_S)

    @contextmanager
    def waiting_for_cause(self) -> Iterator[None]:
        """Delay an error that the block raises for a moment, because the death of another rank may be its cause.

        If a rank has died, this process reports its death to the driver and ends during the delay.
        """
        try:
            yield
        except (EOFError, BrokenPipeError):  # the driver is gone
            raise
        except Exception:
            if self._children:
                time.sleep(4 * _OTHERS_S)  # by then `_receive_all` has ended this process if a rank has died
            raise

    def _receive_all(self) -> None:
        left: set[int] = set()
        rank_of: dict[Any, int] = {child.connection: rank for rank, child in enumerate(self._children, 1)}
        while len(left) < len(rank_of):
            for connection in wait([one for one, rank in rank_of.items() if rank not in left]):
                rank = rank_of[connection]
                message = _receive(self._children[rank - 1])
                self._watch.record_message(rank)
                if isinstance(message, HeartbeatMessage):
                    if message.untimed:
                        self._watch.stop_watching(rank)
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
        ends = [(rank, failed), *self._also_ended(rank)]
        with suppress(BrokenPipeError, ConnectionResetError):
            self._parent.send(min((self._failure(*end) for end in ends), key=_cause_order))
        self._leave(1)

    def _also_ended(self, first: int) -> Iterator[tuple[int, Failed | None]]:
        numbered: dict[Any, int] = {
            child.connection: rank for rank, child in enumerate(self._children, 1) if rank != first
        }
        time.sleep(_OTHERS_S)
        for connection in wait([*numbered], 0) if numbered else ():
            rank = numbered[connection]
            message = _receive(self._children[rank - 1])
            if message is None or isinstance(message, Failed):
                yield rank, message

    def _failure(self, rank: int, failed: Failed | None) -> Failed:
        who = f"rank {rank} of {self._size}"
        if failed is not None:
            return replace(failed, message=f"{who}: {failed.message}")
        ended = self._children[rank - 1].wait(_REAP_S)
        return _death(f"{who} {'closed its connection' if ended is None else ended}", ended)


def _death(what: str, ended: ChildExit | None) -> Failed:
    memory = ended is not None and ended.out_of_memory
    return Failed((OutOfMemory if memory else Unavailable).exit_code, what, "", died=True)


def _cause_order(failed: Failed) -> int:
    return 0 if not failed.detail else 1 if failed.exit_code == OutOfMemory.exit_code else 2


def _receive(child: Child) -> Any:
    try:
        with receiving():
            return child.connection.recv()
    except EOFError:
        return None
