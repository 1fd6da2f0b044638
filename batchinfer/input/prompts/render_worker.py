"""The process that reads rows and runs templates and the tokenizer. It can be killed safely.

A template may loop forever or exhaust the memory, and cannot be interrupted from within. The worker writes the number
of its row to shared memory. If the process dies, or the row takes too long, a new process replaces it. The row may not
be the cause, so it is prepared again on its own, and becomes an error row if that fails, too.
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
from batchinfer.input.prompts.render_reply import BadReply, parse_reply, serialize_failure, serialize_reply
from batchinfer.input.prompts.row_facts import RowFields
from batchinfer.input.prompts.shared_file import BULK_AT, put, shared_file, take
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.machine.memory import limit_memory
from batchinfer.machine.spawning import Child, receiving
from batchinfer.machine.waiting import WaitTimer

_LEAVE_S = 5.0  # time for a process to exit after it closed its pipe
_ENTRY = "batchinfer.input.prompts.render_worker:serve"
_HANGS_IN_A_ROW = 8  # failures of consecutive rows that show a fault of the template; each takes about 20 s
_SIZE = 8  # bytes of the size of a reply
_SPARE = 16  # the timer is set again after 1/_SPARE of the limit of a row
_LOST = 4  # consecutive processes that may die without working on a row
# Limit on elapsed time, as a multiple of the limit on CPU time: the process may be stopped or swapped out, or the
# machine may be busy
IDLE = 6


@dataclass(frozen=True, slots=True)
class RenderSpec:
    """The settings of a render worker, a process that turns rows into prompts. They are sent to the process.

    The time limits are CPU times of the process, since elapsed time on a busy machine says nothing about a row.

    Args:
        tokenizer: The folder or GGUF file of the tokenizer.
        definition: The tokenizer as the text of a tokenizer.json.
        plan: The rules by which the job turns rows into prompts.
        limits: The limits of a prompt.
        fields: The values to take from a row.
        job: The job file, for messages.
        row_timeout_s: The limit for a row in seconds.
        bulk_timeout_s: The limit in seconds for tokenising a batch of prompts, or for checking a constraint.
        memory_bytes: The memory that the process may use in addition to its memory after the start.
    """

    tokenizer: Path
    definition: str
    plan: PromptPlan
    limits: Limits
    fields: RowFields
    job: str = "job.yaml"
    row_timeout_s: float = 10.0
    bulk_timeout_s: float = 120.0
    memory_bytes: int = 1 << 30

    def timeout_s(self, at: int) -> float:
        """Return the time limit in seconds for the present activity of the worker.

        Args:
            at: The number that the worker reports: a row from 0, or a negative number for other activities.
        """
        return self.row_timeout_s if at >= 0 else self.bulk_timeout_s


class RenderWorker:
    """The parent's side of a render worker, a process that turns rows of chunks into prompts, one chunk at a time.

    Call `attend` when `events` signals data, and `look` regularly, since the process may hang.

    Args:
        spec: The settings of the worker.
        definition: The descriptor of a file that contains the text of the tokenizer.json.
        events: The selector in which the worker registers its connection.
    """

    def __init__(self, spec: RenderSpec, definition: int, events: selectors.BaseSelector) -> None:
        self._spec, self._definition, self._events = spec, definition, events
        self._pieces: RowPieces | None = None  # None while there is no chunk
        self._header: InputChunk | None = None
        self._data = b""
        self._lost = 0  # consecutive processes that died without working on a row
        self._renewed = False
        self.began = perf_counter()
        self.ready_at: float | None = None
        self._start()

    def _start(self) -> None:
        self._shared = shared_file()
        self._at = _shared_number(self._shared)
        self._at.value = self._seen = BULK
        self._ready, self._waited = False, WaitTimer()
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
        """True if the process has started and waits for a chunk."""
        return self._ready and self._pieces is None

    def submit(self, chunk: InputChunk, rows: int) -> None:
        """Let the process prepare at most `rows` rows of a chunk. The process must be idle or starting."""
        self._header, self._data = chunk.serialize()
        self._pieces = RowPieces(rows, self._spec.fields)
        self._lost, self._renewed = 0, False
        if self._ready:
            self._send()

    def attend(self) -> PreparedRows | None:
        """Receive a message of the process. Return the prepared rows of the chunk once they are complete, else None.

        A process that died is replaced. A row that hangs or kills the process twice becomes an error row.
        """
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
        return self._receive(size)

    def replace_if_silent(self) -> None:
        """Replace the process if it has reported no new row for several times its time limit."""
        if self.idle:
            return
        if self._at.value != self._seen:
            self._seen = self._at.value
            self._waited.reset()
        limit = IDLE * self._spec.timeout_s(self._seen)
        if self._waited.update() > limit:
            self._failed(
                "template_timeout", f"the process that renders this row made no progress for {limit:g} s"
            )
            self._restart()

    def close(self) -> None:
        """End the process. Safe to call twice."""
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
        self._waited.reset()
        put(self._shared, self._data)
        try:
            self._pipe.send((self._pieces.present, self._header, len(self._data)))
        except (BrokenPipeError, ConnectionResetError):
            return  # the process died before it could read; `attend` notices that and starts another one

    def _receive(self, size: int) -> PreparedRows | None:
        pieces = self._pieces
        if pieces is None:
            raise Unavailable("the process that renders prompts sent an unexpected reply")
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
            return pieces.join()
        return None

    def _reply(self, size: int, pieces: RowPieces) -> PreparedRows:
        if size > self._spec.memory_bytes:
            raise BadReply(f"{size} bytes are more than such a process may have")
        spec = self._spec
        vocab, rungs = spec.limits.vocab_size, len(spec.plan.ladder)
        reply = parse_reply(take(self._shared, size), spec.fields, vocab, rungs)
        if not pieces.fits(len(reply)):
            raise BadReply(f"{len(reply)} rows for {len(pieces.present)}")
        return reply

    def _died(self) -> None:
        # RLIMIT_CPU counts all rows since the start, so exceeding it is not the fault of a row
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
        # A row is only at fault if it was prepared alone, after a first failure
        pieces, row = self._pieces, _row_of(self._at.value)
        if pieces is None or row is None or row >= len(pieces.present):
            self._lose(message)
        elif pieces.present.accused:
            pieces.fail_row(code, f"{message}, with other rows and again with this row alone")
            self._check_streak(pieces, message)
        else:
            pieces.isolate_row(row)

    def _lose(self, message: str) -> None:
        # The process died while it worked on no row
        self._lost += 1
        if self._lost == _LOST:
            text = f"the process that renders prompts cannot be kept running: {message}"
            raise Unavailable(f"{text}; {_LOST} such processes in a row did nothing")
        if self._pieces is not None:
            self._pieces.prepare_singly()

    def _check_streak(self, pieces: RowPieces, message: str) -> None:
        if pieces.blamed == _HANGS_IN_A_ROW:
            text = f"{_HANGS_IN_A_ROW} rows in a row could not be rendered: {message}"
            raise JobFileError(self._spec.job, [Mistake("prompt", f"{text}; does a template loop for ever?")])

    def _restart(self) -> None:
        self.close()
        self._start()


def _row_of(at: int) -> int | None:
    # Negative: no row, or waiting for the process that checks constraints, which retries on its own
    return at if at >= 0 else None


def serve(spec: RenderSpec, shared: int, definition: int, pipe: Connection[Any, Any]) -> None:
    """Run the process of a render worker: receive chunks and send replies, until the parent closes the pipe or dies.

    Args:
        spec: The settings of the worker.
        shared: The descriptor of a file that both processes share. It has the number of the current row, and carries
            large data in both directions.
        definition: The descriptor of a file that contains the text of the tokenizer.json.
        pipe: The connection to the parent.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many workers as cores
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    tokenizer = Tokenizer(spec.tokenizer, take(definition, os.fstat(definition).st_size - BULK_AT).decode())
    report = _Report(_shared_number(shared), spec)
    preparer = Preparer(spec.plan, spec.limits, tokenizer, report, spec.fields)
    # Set after loading, since the size of the tokenizer depends on the checkpoint
    limit_memory(spec.memory_bytes)
    pipe.send_bytes(b"")  # ready
    while True:
        try:
            with receiving():
                piece, header, size = pipe.recv()
        except EOFError:
            return
        try:
            reply = serialize_reply(preparer.prepare(header.deserialize(take(shared, size)), piece))
            put(shared, reply)
        except Unavailable as error:  # a process cannot start, or the reply does not fit
            reply = serialize_failure(str(error))
            put(shared, reply)
        pipe.send_bytes(len(reply).to_bytes(_SIZE, "little"))


class _Report:
    """Reports the current row to the parent, and sets a timer with which the kernel kills this process if it hangs.

    Args:
        at: The shared number of the current row.
        spec: The settings of the worker.
    """

    def __init__(self, at: ctypes.c_long, spec: RenderSpec) -> None:
        self._at, self._spec = at, spec
        self._kind = -1  # 0 for rows, 1 for work with the longer limit
        self._until = 0.0  # the time until which the timer leaves at least the limit

    def __call__(self, row: int) -> None:
        self._at.value = row
        kind = 0 if row >= 0 else 1
        now = monotonic()  # the CPU time of one thread does not pass faster than this clock
        # Setting the timer is as slow as parsing a row, so a row may get some spare time instead
        if kind != self._kind or now > self._until:
            limit = self._spec.timeout_s(row)
            spare = limit / _SPARE
            signal.setitimer(signal.ITIMER_PROF, limit + spare)
            self._kind, self._until = kind, now + spare


def _shared_number(file: int) -> ctypes.c_long:
    return ctypes.c_long.from_buffer(mmap.mmap(file, ctypes.sizeof(ctypes.c_long)))
