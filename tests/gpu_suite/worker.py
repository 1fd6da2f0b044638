"""The process that measures: a section that hangs, or spoils the device for whatever follows, ends with it."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from batchinfer.machine.spawning import receiving
from tests.gpu_suite.section import DeviceLost, NoTimeLeft, Section, Setting
from tests.kernels.gpu import interpreter

END_S = 5.0  # after which a process that was told to leave is ended
# A part of a section without a model that takes so long, and a third of its section, is ended: its kernel hangs. It may
# have to wait for the compiler, and in a first part for the GPU.
PART_S, PART_SHARE = 20.0, 1 / 3
GRACE_S = 3.0  # a section ends itself when its time is over; one that is still there so much later is ended


def serve(channel: Connection, rehearsal: bool) -> None:
    """Runs sections until it is told None. What runs here is the child."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here is to be fetched, nor waited for
    if rehearsal:  # before triton is imported
        interpreter.switch_on()
    while (task := channel.recv()) is not None:
        module, setting, began = task
        channel.send(("end", _run(module, Section(setting, lambda *told: channel.send(told), began))))


def _run(module: str, section: Section) -> dict[str, Any]:
    began = time.monotonic()
    out_of_time, lost = None, False
    try:
        importlib.import_module(module).run(section)
    except NoTimeLeft as end:
        out_of_time = str(end)
    except DeviceLost:
        lost = True
    except Exception as error:  # noqa: BLE001 - told to the parent, which goes on with the other sections
        section.failure(module.rpartition(".")[2], error)
    return {"seconds": time.monotonic() - began, "out_of_time": out_of_time, "lost": lost}


class Worker:
    """Starts a process when there is something to run, keeps it while all goes well, and replaces it otherwise."""

    def __init__(self, rehearsal: bool) -> None:
        self._rehearsal = rehearsal
        self._process: Any = None
        self._channel: Any = None

    def run(
        self, module: str, setting: Setting, tell: Callable[[str, dict[str, Any]], None]
    ) -> dict[str, Any]:
        """Run a section; `tell` hears of results and failures as they come. Returns its seconds, if its time ran out
        what it did not reach, and as `lost_at` with how many of its parts the process, or the device for it, was lost,
        if it was."""
        began = time.monotonic()
        self._start()
        self._channel.send((module, setting, began))  # a process takes long to start, and that counts, too
        failed, part, ends = False, 0, began + setting.seconds + GRACE_S
        hangs = ends  # when the present part is taken to hang
        while (left := min(ends, hangs) - time.monotonic()) > 0:
            if not self._channel.poll(left):
                break
            try:
                with receiving():
                    kind, said = self._channel.recv()
            except EOFError:
                tell("failure", _fatal(f"the process ended with code {self._ended()}"))
                return {"seconds": time.monotonic() - began, "out_of_time": None, "lost_at": part}
            if kind == "end":
                if failed:  # an error on the device outlasts what caused it
                    self.close()
                lost = said.pop("lost")
                return {**said, "lost_at": part if lost else 0}
            if kind == "part":
                part = said["number"]
                if setting.model is None:
                    hangs = time.monotonic() + max(PART_S, PART_SHARE * setting.seconds)
                continue
            failed |= kind == "failure"
            tell(kind, said)
        self._ended()
        seconds = time.monotonic() - began
        if hangs < ends:
            tell("failure", _fatal(f"part {part} did not end, and was ended after {seconds:.0f} s"))
            return {"seconds": seconds, "out_of_time": None, "lost_at": part}
        return {"seconds": seconds, "out_of_time": f"ended after {seconds:.0f} s"}

    def close(self) -> None:
        """Let the process leave, or end it."""
        if self._process is None:
            return
        if self._process.is_alive():
            self._channel.send(None)
            self._process.join(END_S)
        self._ended()

    def _start(self) -> None:
        if self._process is not None:
            if self._process.is_alive():
                return
            self._ended()
        context = get_context("spawn")
        self._channel, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self._rehearsal), daemon=False)
        self._process.start()
        theirs.close()

    def _ended(self) -> int | None:
        """End the process if it is still there; its exit code."""
        process, self._process = self._process, None
        process.kill()
        process.join()
        self._channel.close()
        return None if process.exitcode is None else int(process.exitcode)


def _fatal(message: str) -> dict[str, Any]:
    return {"what": "process", "message": message, "traceback": None}
