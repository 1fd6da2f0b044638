"""The process that reads rows and runs templates and the tokenizer, where it can be killed without harm.

A template may loop for ever or ask for all memory, and neither can be stopped from within. The worker notes
which row it is at in shared memory. When the process dies, or that row takes too long, a new process takes its place;
the row is prepared again by itself, as anything may have ended a process, and becomes an error row if that fails, too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import selectors
import signal
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from batchinfer.core.errors import JobFileError, Mistake, Unavailable
from batchinfer.input.chunk import InputChunk
from batchinfer.input.prompts.builder import PromptPlan
from batchinfer.input.prompts.prepare import BULK, Limits, Preparer
from batchinfer.input.prompts.prepared.rows import PreparedRows
from batchinfer.input.prompts.render_pieces import RowPieces
from batchinfer.input.prompts.render_reply import BadReply, packed, packed_failure, unpacked
from batchinfer.input.prompts.row_facts import RowFields
from batchinfer.input.prompts.shared_file import BULK_AT, put, shared_file, take
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.machine.memory import limit_memory
from batchinfer.machine.spawning import Child, receiving
from batchinfer.machine.waiting import Waited

_LEAVE_S = 5.0  # a process that closed its pipe has ended by then
_ENTRY = "batchinfer.input.prompts.render_worker:serve"
_HANGS_IN_A_ROW = 8  # then it is the template, not the rows: at 20 s each the job would never end
_SIZE = 8  # bytes of the number that says how large a reply is
_SPARE = 16  # a row's timer is set anew when this part of its limit has passed
_LOST = 4  # processes in a row that ended at no row
# Times as long as it may work, a process may do so little that its CPU time does not run out: it is stopped, or swapped
# out, or the machine is busy.
IDLE = 6


@dataclass(frozen=True, slots=True)
class RenderSpec:
    """The settings of a worker. `row_timeout_s` is for one row, `bulk_timeout_s` for tokenising a whole batch, both in
    seconds of the worker's CPU time: neither a busy machine nor a process that is stopped says anything of a row.

    `memory_bytes` is what the worker may take beyond what it has after start-up.
    """

    tokenizer: Path
    definition: str  # of the tokenizer: Tokenizer.definition
    plan: PromptPlan
    limits: Limits
    fields: RowFields
    job: str = "job.yaml"
    row_timeout_s: float = 10.0
    bulk_timeout_s: float = 120.0
    memory_bytes: int = 1 << 30

    def timeout_s(self, at: int) -> float:
        """Return the limit in seconds for the work that the worker reports to be `at`."""
        return self.row_timeout_s if at >= 0 else self.bulk_timeout_s


class RenderWorker:
    """One worker process, which prepares one chunk after the other.

    `attend` when `events` says that it has sent something, and `look` at it now and then: it may hang. `definition` is
    a file with that of the tokenizer.
    """

    def __init__(self, spec: RenderSpec, definition: int, events: selectors.BaseSelector) -> None:
        self._spec, self._definition, self._events = spec, definition, events
        self._pieces: RowPieces | None = None  # None: nothing is to be done
        self._header: InputChunk | None = None
        self._data = b""
        self._lost = 0  # processes in a row that did nothing
        self._renewed = False
        self.began = perf_counter()
        self.ready_at: float | None = None
        self._start()

    def _start(self) -> None:
        self._shared = shared_file()
        self._at = _shared_number(self._shared)
        self._at.value = self._seen = BULK
        self._ready, self._waited = False, Waited()
        spec = replace(self._spec, definition="")
        files = [self._shared, self._definition]
        try:
            self._child = Child(_ENTRY, spec, self._shared, self._definition, files=files)
        except BaseException:
            os.close(self._shared)
            self._shared = -1
            raise
        self._pipe = self._child.connection
        self._events.register(self._pipe.fileno(), selectors.EVENT_READ, self)

    @property
    def idle(self) -> bool:
        """Whether it waits for a chunk."""
        return self._ready and self._pieces is None

    def submit(self, chunk: InputChunk, rows: int) -> None:
        """Hand over a chunk of `rows` rows at the most, of which no more are read; the worker must be idle."""
        self._header, self._data = chunk.packed()
        self._pieces = RowPieces(rows, self._spec.fields)
        self._lost, self._renewed = 0, False
        if self._ready:
            self._send()

    def attend(self) -> PreparedRows | None:
        """Take what the process has sent. Return the chunk, once all of it is prepared: rows that hang or kill the
        worker, twice, are errors."""
        try:
            with receiving():
                size = int.from_bytes(self._pipe.recv_bytes(_SIZE), "little")
        except EOFError:
            self._died()
            self._restart()
            return None
        if not self._ready:
            self._ready = True
            self.ready_at = self.ready_at or perf_counter()
            if self._pieces is not None:
                self._send()
            return None
        return self._taken(size)

    def look(self) -> None:
        """Replace the process by another one if it hangs."""
        if self.idle:
            return
        if self._at.value != self._seen:
            self._seen = self._at.value
            self._waited.again()
        limit = IDLE * self._spec.timeout_s(self._seen)
        if self._waited.look() > limit:
            self._failed(
                "template_timeout", f"the process that renders this row made no progress for {limit:g} s"
            )
            self._restart()

    def close(self) -> None:
        """End the process; safe to call twice."""
        if self._shared < 0:
            return
        self._events.unregister(self._pipe.fileno())
        self._child.close()
        os.close(self._shared)
        self._shared = -1

    def _send(self) -> None:
        if self._pieces is None:
            return
        self._at.value = self._seen = BULK
        self._waited.again()
        put(self._shared, self._data)
        try:
            self._pipe.send((self._pieces.present, self._header, len(self._data)))
        except (BrokenPipeError, ConnectionResetError):
            return  # it died before it could read: `attend` sees that and starts another

    def _taken(self, size: int) -> PreparedRows | None:
        """Take the reply to the present piece."""
        pieces = self._pieces
        if pieces is None:
            raise Unavailable("the process that renders prompts sent something that nobody asked for")
        try:
            reply = self._reply(size, pieces)
        except BadReply as error:
            self._lose(f"its reply is damaged: {error}")
            self._restart()
            return None
        self._lost = 0
        if not pieces.done(reply):
            self._restart()
        elif pieces:
            self._send()
        else:
            self._pieces, self._header, self._data = None, None, b""
            return pieces.joined()
        return None

    def _reply(self, size: int, pieces: RowPieces) -> PreparedRows:
        """Raises BadReply."""
        if size > self._spec.memory_bytes:
            raise BadReply(f"{size} bytes are more than such a process may have")
        spec = self._spec
        vocab, rungs = spec.limits.vocab_size, len(spec.plan.ladder)
        reply = unpacked(take(self._shared, size), spec.fields, vocab, rungs)
        if not pieces.fits(len(reply)):
            raise BadReply(f"{len(reply)} rows for {len(pieces.present)}")
        return reply

    def _died(self) -> None:
        """Handle a worker's death, by itself or by a limit. RLIMIT_CPU counts all rows since the start, so it blames no
        row."""
        ended = self._child.wait(_LEAVE_S)
        if ended is not None and ended.out_of_cpu_time:
            if self._renewed:
                raise Unavailable(f"the process that renders prompts {ended} within one batch; raise it")
            self._renewed = True
        elif ended is not None and ended.code == -signal.SIGPROF:
            limit = self._spec.timeout_s(self._at.value)
            self._failed("template_timeout", f"rendering took longer than {limit:g} s of CPU time")
        else:
            how = "" if ended is None else f" (it {ended})"
            self._failed(
                "template_crash",
                f"the process that renders prompts died while rendering or tokenising this row{how}",
            )

    def _failed(self, code: str, message: str) -> None:
        """The process ended or hung. Only a row that it was at, alone, and for the second time, is at fault."""
        pieces, row = self._pieces, _row_of(self._at.value)
        if pieces is None or row is None or row >= len(pieces.present):
            self._lose(message)
        elif pieces.present.accused:
            pieces.blame(code, f"{message}, with other rows and again with this row alone")
            self._check_streak(pieces, message)
        else:
            pieces.accuse(row)

    def _lose(self, message: str) -> None:
        """Another process ended, and no row is known to be at fault."""
        self._lost += 1
        if self._lost == _LOST:
            text = f"the process that renders prompts cannot be kept running: {message}"
            raise Unavailable(f"{text}; {_LOST} such processes in a row did nothing")
        if self._pieces is not None:
            self._pieces.be_careful()

    def _check_streak(self, pieces: RowPieces, message: str) -> None:
        if pieces.blamed == _HANGS_IN_A_ROW:
            text = f"{_HANGS_IN_A_ROW} rows in a row could not be rendered: {message}"
            raise JobFileError(self._spec.job, [Mistake("prompt", f"{text}; does a template loop for ever?")])

    def _restart(self) -> None:
        self.close()
        self._start()


def _row_of(at: int) -> int | None:
    """The row of the present piece that a worker reports. None: it was at no row, or another process was at work for
    it, which checks constraints and is asked twice itself."""
    return at if at >= 0 else None


def serve(spec: RenderSpec, shared: int, definition: int, pipe: Connection[Any, Any]) -> None:
    """The worker's whole life: chunks in, replies out, until the parent closes the pipe or dies.

    `shared` is the descriptor of the file through which the parent sees the row that is at work and what is large goes
    to and fro; `definition` that of the tokenizer.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers themselves fill the cores
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    tokenizer = Tokenizer(spec.tokenizer, take(definition, os.fstat(definition).st_size - BULK_AT).decode())
    report = _Report(_shared_number(shared), spec)
    preparer = Preparer(spec.plan, spec.limits, tokenizer, report, spec.fields)
    # after the copies of the tokenizer, which are as large as the checkpoint has it
    limit_memory(spec.memory_bytes)
    pipe.send_bytes(b"")  # ready
    while True:
        try:
            with receiving():
                piece, header, size = pipe.recv()
        except EOFError:
            return
        try:
            reply = packed(preparer.prepare(header.unpacked(take(shared, size)), piece))
            put(shared, reply)
        except (
            Unavailable
        ) as error:  # no row's fault: it cannot start another process, or has no room for its reply
            reply = packed_failure(str(error))
            put(shared, reply)
        pipe.send_bytes(len(reply).to_bytes(_SIZE, "little"))


class _Report:
    """Reports the row in work, and sets the CPU time after which the system ends this process, whatever library it is
    in.

    The timer is set anew only when a part of the limit has passed, for setting it takes as long as parsing a row. Each
    row then has that part more than the limit.
    """

    def __init__(self, at: ctypes.c_long, spec: RenderSpec) -> None:
        self._at, self._spec = at, spec
        self._kind = -1  # of work: rows (0), or what takes longer (1)
        self._until = 0.0  # by the clock, up to which the timer that is set leaves time enough

    def __call__(self, row: int) -> None:
        self._at.value = row
        kind = 0 if row >= 0 else 1
        now = monotonic()  # CPU time of one thread passes no faster
        if kind != self._kind or now > self._until:
            limit = self._spec.timeout_s(row)
            spare = limit / _SPARE
            signal.setitimer(signal.ITIMER_PROF, limit + spare)
            self._kind, self._until = kind, now + spare


def _shared_number(file: int) -> ctypes.c_long:
    """A number that all processes see that have this file."""
    return ctypes.c_long.from_buffer(mmap.mmap(file, ctypes.sizeof(ctypes.c_long)))
