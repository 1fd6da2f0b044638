"""The measuring process. A part that hangs or breaks the device ends with it."""

from __future__ import annotations

import importlib
import os
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from batchinfer.machine.spawning import receiving
from tests.suite.section import BenchSection, Part

END_S = 5.0  # a process is killed this long after the request to leave


class Lost(Exception):
    """The process died, or was killed after its time limit."""


@dataclass
class Reply:
    """The reply to a request: the names of a section's parts, or the results of one part."""

    names: list[str] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    usable: bool = True  # False: the process has lost the device


def serve(channel: Connection, prepare: str | None) -> None:
    """Answer questions until None arrives. Runs in the child process. `prepare`: a module to call first."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # do not fetch anything, nor wait for it
    if prepare is not None:
        importlib.import_module(prepare).prepare()
    while (question := channel.recv()) is not None:
        channel.send(_answer(*question))


def _answer(source: str, section: BenchSection, part: int | None) -> Reply:
    """Return the names of a section's parts, or run part `part`."""
    answer, what = Reply(failures=section.failures), source
    try:
        parts = parts_of(source, section)
        if part is None:
            answer.names = [name for name, _ in parts]
        else:
            what, measure = parts[part]
            found = measure()
            answer.results += [asdict(each) for each in (found if isinstance(found, list) else [found])]
    except Exception as error:  # noqa: BLE001 - told to the parent, which goes on with the other parts
        section.failed(what, error)
        answer.usable = section.rehearsal or _device_answers()
    return answer


def parts_of(source: str, section: BenchSection) -> list[Part]:
    module, _, function = source.partition(":")
    return list(getattr(importlib.import_module(module), function or "parts")(section))


def _device_answers() -> bool:
    """Return True if the device still works for this process, or there is none. Kernel errors are permanent."""
    import torch

    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
        return bool(torch.ones(1, device="cuda").item())
    except RuntimeError:
        return False


class Worker:
    """Starts a process when needed, keeps it while parts succeed, and replaces it otherwise."""

    def __init__(self, prepare: str | None = None) -> None:
        self._prepare = prepare
        self._process: Any = None
        self._channel: Any = None

    def ask(self, source: str, section: BenchSection, part: int | None, within_s: float) -> Reply:
        """Return the answer to one question. Raises Lost."""
        if self._process is not None and not self._process.is_alive():
            self._end()
        if self._process is None:
            self._start()
        try:
            self._channel.send((source, section, part))
            if self._channel.poll(max(0.0, within_s)):
                with receiving():
                    answer: Reply = self._channel.recv()
                if not answer.usable:
                    self.close()
                return answer
        except (EOFError, BrokenPipeError):
            raise Lost(f"the process ended with code {self._end()}") from None
        self._process.kill()
        self._end()
        raise Lost(f"did not end, and was ended after {within_s:.0f} s")

    def close(self) -> None:
        """Let the process exit, or kill it."""
        if self._process is not None:
            if self._process.is_alive():
                self._channel.send(None)
            self._end()

    def _start(self) -> None:
        context = get_context("spawn")
        self._channel, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self._prepare), daemon=False)
        self._process.start()
        theirs.close()

    def _end(self) -> int | None:
        """Wait for a process that exits, or kill it. Return its exit code."""
        process, self._process = self._process, None
        process.join(END_S)
        process.kill()
        process.join()
        self._channel.close()
        return None if process.exitcode is None else int(process.exitcode)
