"""The process that runs templates and the tokenizer, where it can be killed without harm.

A template may loop for ever or ask for all memory, and neither can be stopped from within. The worker notes
which row it is at in shared memory; when that row takes too long, or the process dies, the row becomes an error
row, a new process takes its place and the other rows go on.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.data.input.rows import Values, row_error
from batchinfer.data.prompts.builder import PromptPlan
from batchinfer.data.prompts.prepare import BULK, Limits, Prepared, Preparer
from batchinfer.data.prompts.tokenizer import Tokenizer
from batchinfer.errors import JobFileError, Mistake, Unavailable
from batchinfer.memory import limit_memory
from batchinfer.request import RowError
from batchinfer.spawning import Child, receiving

_POLL_S = 0.25
_LEAVE_S = 5.0  # a process that closed its pipe has ended by then
_ENTRY = "batchinfer.data.prompts.render_worker:serve"
_HANGS_IN_A_ROW = 8  # then it is the template, not the rows: at 10 s each the job would never end


@dataclass(frozen=True, slots=True)
class RenderSpec:
    """What a worker needs. `row_timeout_s` is for one row, `bulk_timeout_s` for tokenising a whole batch.

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


class RenderWorker:
    """One worker process. `submit` a batch, then take its `result`; one batch at a time."""

    def __init__(self, spec: RenderSpec) -> None:
        self._spec = spec
        self._rows: Sequence[Values] = ()
        self._known: dict[int, RowError] = {}
        self._live: list[int] = []
        self._careful = self._renewed = False
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
        self._rows, self._known, self._careful, self._renewed = rows, {}, False, False
        self._send()

    def result(self) -> Prepared:
        """The submitted batch, prepared. Rows that hang or kill the worker come back as errors."""
        while True:
            reply = self._wait()
            if reply is not None:
                return _with_known(reply, self._live, self._known, len(self._rows))
            self._restart()

    def close(self) -> None:
        """End the process; safe to call twice."""
        self._child.close()

    def _send(self) -> None:
        self._live = [i for i in range(len(self._rows)) if i not in self._known]
        self._at.value = BULK
        try:
            self._pipe.send((self._careful, [self._rows[i] for i in self._live]))
        except (BrokenPipeError, ConnectionResetError):
            return  # it died before it could read: `result` sees that and starts another

    def _wait(self) -> Prepared | None:
        """The reply, or None when the process hangs or died; the culprit is then noted."""
        at, since = self._at.value, time.monotonic()
        while not self._pipe.poll(_POLL_S):
            if self._at.value != at:
                at, since = self._at.value, time.monotonic()
            limit = self._spec.row_timeout_s if at >= 0 else self._spec.bulk_timeout_s
            if time.monotonic() - since > limit:
                self._blame("template_timeout", f"rendering took longer than {limit:g} s")
                return None
        try:
            with receiving():
                reply = self._pipe.recv_bytes()
        except EOFError:
            self._died()
            return None
        return _unpacked(reply)

    def _died(self) -> None:
        """Of its own accord or by a limit. CPU time is that of all rows since it started: then no row is to blame."""
        ended = self._child.wait(_LEAVE_S)
        if ended is not None and ended.out_of_cpu_time:
            if self._renewed:
                raise Unavailable(f"the process that renders prompts {ended} within one batch; raise it")
            self._renewed = True
        else:
            how = "" if ended is None else f" (it {ended})"
            self._blame(
                "template_crash", f"rendering or tokenising this row ended the process that did it{how}"
            )

    def _blame(self, code: str, message: str) -> None:
        at = self._at.value
        if 0 <= at < len(self._live):
            self._known[self._live[at]] = row_error(code, message, "resource")
            self._check_streak(self._live[at])
        elif self._careful or not self._live:
            raise Unavailable(f"the process that renders prompts cannot be kept running: {message}")
        else:
            self._careful = True

    def _check_streak(self, row: int) -> None:
        streak = range(row - _HANGS_IN_A_ROW + 1, row + 1)
        if all(i in self._known for i in streak):
            message = f"{_HANGS_IN_A_ROW} rows in a row could not be rendered: {self._known[row].message}"
            raise JobFileError(
                self._spec.job, [Mistake("prompt", f"{message}; does a template loop for ever?")]
            )

    def _restart(self) -> None:
        self.close()
        self._start()
        self._send()


def _with_known(reply: Prepared, live: list[int], known: dict[int, RowError], size: int) -> Prepared:
    """Put the rows that did not survive back among those that did."""
    if not known:
        return reply
    spread = Prepared(dict(known), reply.params, [0] * size, [0] * size, *_blank(size), reply.tokens)
    keys = bytearray(32 * size)
    for position, index in enumerate(live):
        spread.params_of[index] = reply.params_of[position]
        spread.max_tokens[index] = reply.max_tokens[position]
        spread.counts[index] = reply.counts[position]
        keys[32 * index : 32 * index + 32] = reply.keys[32 * position : 32 * position + 32]
        if position in reply.errors:
            spread.errors[index] = reply.errors[position]
    spread.keys = bytes(keys)
    return spread


def _blank(size: int) -> tuple[Any, bytes]:
    return np.zeros(size, np.int32), b""


def _packed(done: Prepared) -> bytes:
    """JSON and raw numbers, never a pickle: the worker ran what others wrote."""
    head = {
        "errors": {str(i): asdict(e) for i, e in done.errors.items()},
        "params": done.params,
        "params_of": done.params_of,
        "max_tokens": done.max_tokens,
    }
    text = json.dumps(head).encode()
    parts = (done.counts.tobytes(), done.keys, done.tokens.tobytes())
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def _unpacked(data: bytes) -> Prepared:
    start = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:start])
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

    def report(row: int) -> None:
        at.value = row

    tokenizer = Tokenizer(spec.tokenizer, spec.definition)
    limit_memory(spec.memory_bytes)
    preparer = Preparer(spec.plan, spec.limits, tokenizer, report)
    while True:
        try:
            with receiving():
                careful, rows = pipe.recv()
        except EOFError:
            return
        pipe.send_bytes(_packed(preparer.prepare(rows, careful)))


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
