"""The process that runs templates and the tokenizer, where it can be killed without harm.

A template may loop for ever or ask for all memory, and neither can be stopped from within. The worker notes
which row it is at in shared memory. When the process dies, or that row takes too long, a new process takes its place;
the row is prepared again by itself, as anything may have ended a process, and becomes an error row if that fails, too.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.core.errors import JobFileError, Mistake, Unavailable
from batchinfer.core.request import RowError
from batchinfer.data.input.rows import Values
from batchinfer.data.prompts.builder import PromptPlan
from batchinfer.data.prompts.prepare import BULK, Limits, Prepared, Preparer
from batchinfer.data.prompts.render_pieces import RowPieces
from batchinfer.data.tokenizer.tokenizer import Tokenizer
from batchinfer.machine.memory import limit_memory
from batchinfer.machine.spawning import Child, receiving
from batchinfer.machine.waiting import LOOK_S, Waited

_LEAVE_S = 5.0  # a process that closed its pipe has ended by then
_ENTRY = "batchinfer.data.prompts.render_worker:serve"
_HANGS_IN_A_ROW = 8  # then it is the template, not the rows: at 20 s each the job would never end
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
    job: str = "job.yaml"
    row_timeout_s: float = 10.0
    bulk_timeout_s: float = 120.0
    memory_bytes: int = 1 << 30

    def timeout_s(self, at: int) -> float:
        """Return the limit in seconds for the work that the worker reports to be `at`."""
        return self.row_timeout_s if at >= 0 else self.bulk_timeout_s


class RenderWorker:
    """One worker process. `submit` a batch, then take its `result`; one batch at a time."""

    def __init__(self, spec: RenderSpec) -> None:
        self._spec = spec
        self._rows: Sequence[Values] = ()
        self._pieces = RowPieces(0)
        self._lost = 0  # processes in a row that did nothing
        self._renewed = False
        self._start()

    def _start(self) -> None:
        shared = _shared_file()
        try:
            self._at = _shared_number(shared)
            self._child = Child(_ENTRY, self._spec, shared, files=[shared])
        finally:
            os.close(shared)
        self._pipe = self._child.connection

    def submit(self, rows: Sequence[Values]) -> None:
        """Hand a batch over; the previous one's result must have been taken."""
        self._rows, self._pieces = rows, RowPieces(len(rows))
        self._lost, self._renewed = 0, False
        self._send()

    def result(self) -> Prepared:
        """The submitted batch, prepared. Rows that hang or kill the worker, twice, come back as errors."""
        while self._pieces:
            reply = self._wait()
            if reply is None or not self._pieces.done(reply):
                self._restart()
            elif self._pieces:
                self._send()
            self._lost = 0 if reply is not None else self._lost
        return self._pieces.joined()

    def close(self) -> None:
        """End the process; safe to call twice."""
        self._child.close()

    def _send(self) -> None:
        piece = self._pieces.present
        self._at.value = BULK
        try:
            self._pipe.send((piece.careful, list(self._rows[piece.start : piece.stop])))
        except (BrokenPipeError, ConnectionResetError):
            return  # it died before it could read: `result` sees that and starts another

    def _wait(self) -> Prepared | None:
        """The reply, or None when the process hangs or died; what it was at is then noted."""
        at, waited = self._at.value, Waited()
        while not self._pipe.poll(LOOK_S):
            if self._at.value != at:
                at = self._at.value
                waited.again()
            limit = IDLE * self._spec.timeout_s(at)
            if waited.look() > limit:
                self._failed(
                    "template_timeout", f"the process that renders this row made no progress for {limit:g} s"
                )
                return None
        try:
            with receiving():
                reply = self._pipe.recv_bytes()
        except EOFError:
            self._died()
            return None
        return _unpacked(reply)

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
        if row is None or row >= len(pieces.present):
            self._lost += 1
            if self._lost == _LOST:
                text = f"the process that renders prompts cannot be kept running: {message}"
                raise Unavailable(f"{text}; {_LOST} such processes in a row did nothing")
            pieces.be_careful()
        elif pieces.present.accused:
            pieces.blame(code, f"{message}, with other rows and again with this row alone")
            self._check_streak(message)
        else:
            pieces.accuse(row)

    def _check_streak(self, message: str) -> None:
        if self._pieces.blamed == _HANGS_IN_A_ROW:
            text = f"{_HANGS_IN_A_ROW} rows in a row could not be rendered: {message}"
            raise JobFileError(self._spec.job, [Mistake("prompt", f"{text}; does a template loop for ever?")])

    def _restart(self) -> None:
        self.close()
        self._start()
        if self._pieces:
            self._send()


def _row_of(at: int) -> int | None:
    """The row of the present piece that a worker reports. None: it was at no row, or another process was at work for
    it, which checks constraints and is asked twice itself."""
    return at if at >= 0 else None


def _packed(done: Prepared) -> bytes:
    """JSON and raw numbers, never a pickle: the worker ran what others wrote."""
    head = {
        "errors": {str(i): asdict(e) for i, e in done.errors.items()},
        "params": done.params,
        "params_of": done.params_of,
        "max_tokens": done.max_tokens,
    }
    return _framed(head, done.counts.tobytes(), done.keys, done.tokens.tobytes())


def _framed(head: dict[str, Any], *parts: bytes) -> bytes:
    text = json.dumps(head).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def _unpacked(data: bytes) -> Prepared:
    """Raises Unavailable where the worker could not prepare anything."""
    start = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:start])
    if "failed" in head:
        raise Unavailable(head["failed"])
    size = len(head["params_of"])
    counts = np.frombuffer(data, np.int32, size, start).copy()
    start += 4 * size
    errors = {int(i): RowError(**e) for i, e in head["errors"].items()}
    keys, tokens = data[start : start + 32 * size], np.frombuffer(data, np.int32, offset=start + 32 * size)
    return Prepared(errors, head["params"], head["params_of"], head["max_tokens"], counts, keys, tokens)


def serve(spec: RenderSpec, shared: int, pipe: Connection[Any, Any]) -> None:
    """The worker's whole life: batches in, replies out, until the parent closes the pipe or dies.

    `shared` is the descriptor of the file through which the parent sees the row that is at work.
    """
    at = _shared_number(shared)
    os.close(shared)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers themselves fill the cores

    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])

    def report(row: int) -> None:
        """Report the row in work, and set the CPU time after which the system ends this process, whatever library it is
        in."""
        at.value = row
        signal.setitimer(signal.ITIMER_PROF, spec.timeout_s(row))

    tokenizer = Tokenizer(spec.tokenizer, spec.definition)
    preparer = Preparer(spec.plan, spec.limits, tokenizer, report)
    limit_memory(
        spec.memory_bytes
    )  # after the copies of the tokenizer, which are as large as the checkpoint has it
    while True:
        try:
            with receiving():
                careful, rows = pipe.recv()
        except EOFError:
            return
        try:
            reply = _packed(preparer.prepare(rows, careful))
        except Unavailable as error:  # no row's fault, and not this process's: it cannot start another one
            reply = _framed({"failed": str(error)})
        pipe.send_bytes(reply)


def _shared_file() -> int:
    """The descriptor of a nameless file, in memory where the system has such files."""
    if sys.platform == "linux":
        file = os.memfd_create("batchinfer-render")
    else:
        with tempfile.TemporaryFile() as made:
            file = os.dup(made.fileno())
    os.ftruncate(file, ctypes.sizeof(ctypes.c_long))
    return file


def _shared_number(file: int) -> ctypes.c_long:
    """A number that all processes see that have this file."""
    return ctypes.c_long.from_buffer(mmap.mmap(file, ctypes.sizeof(ctypes.c_long)))
