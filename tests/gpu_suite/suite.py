"""The sections in order of value, each with its share of the time, and the record that they make."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu_suite.machine import describe
from tests.gpu_suite.section import Model, Setting
from tests.gpu_suite.worker import Worker

PLACE = "tests.gpu_suite"
LEAST_S = 2.0  # with less left a section is not begun


@dataclass(frozen=True, slots=True)
class Entry:
    """A section: its module, and how much of the time it may have. What one leaves over goes to those behind it."""

    name: str
    share: float
    module: str
    model: Model | None = None  # that it runs; a process has one
    calls: tuple[str, ...] = ()  # of the command that it belongs to

    @classmethod
    def of(
        cls, calls: str, name: str, share: float, module: str | None = None, model: Model | None = None
    ) -> Entry:
        return cls(name, share, f"{PLACE}.{module or name}", model, tuple(calls.split()))


SMALL = Model("qwen2.5-0.5b", 0.9)
LARGE = Model("llama-3.1-8b", 0.9)
LARGE_BESIDE = Model("llama-3.1-8b", 0.45)  # what it is compared with needs as much
CALLS = ("tests", "kernels", "models")
# In three commands, each of nine minutes; the most valuable of each first. Shares are seconds; they are estimates until
# they have been seen on a GPU.
ENTRIES = (
    Entry.of("tests", "tests", 520, "kernel_tests"),
    Entry.of("kernels models", "peaks", 15),
    Entry.of("kernels", "attention", 110),
    Entry.of("kernels", "tiles", 190),
    Entry.of("kernels", "matmul", 120),
    Entry.of("kernels", "pointwise", 30),
    Entry.of("kernels", "sampling", 50),
    Entry.of("models", "small-steady", 75, "workloads", SMALL),
    Entry.of("models", "small-profile", 20, "profile", SMALL),
    Entry.of("models", "model", 75, "model", LARGE),
    Entry.of("models", "profile", 45, "profile", LARGE),
    Entry.of("models", "steady", 175, "workloads", LARGE),
    Entry.of("models", "against", 120, "against", LARGE_BESIDE),
    Entry.of("kernels models", "peaks-again", 10, "peaks"),
)


@dataclass(slots=True)
class Suite:
    """A run of the suite. `changed` hears of the record whenever a section has ended."""

    root: Path
    rehearsal: bool
    minutes: float
    notice: Callable[[str], None]
    changed: Callable[[dict[str, Any]], None]
    entries: tuple[Entry, ...] = ENTRIES
    _model: Model | None = None  # of the present process
    _began: float = field(default_factory=time.monotonic)

    def run(self) -> dict[str, Any]:
        """The record, whatever failed; `failed` in it says whether anything did."""
        record = {**describe(self.root, self.rehearsal), "minutes": self.minutes, "sections": []}
        worker = Worker(self.rehearsal)
        try:
            for number in range(len(self.entries)):
                record["sections"].append(self._section(worker, number, record))
                record["failed"] = any(section["status"] != "ok" for section in record["sections"])
                self.changed(record)
        finally:
            worker.close()
        return record

    def _section(self, worker: Worker, number: int, record: dict[str, Any]) -> dict[str, Any]:
        entry, limit = self.entries[number], self._limit(number)
        results: list[dict[str, Any]] = []
        failures: list[dict[str, Any]] = []
        found = {"name": entry.name, "limit_s": limit, "results": results, "failures": failures}
        if limit < LEAST_S:
            self.notice(f"{entry.name}: no time left")
            return {**found, "status": "out of time", "seconds": 0.0, "out_of_time": "not begun"}
        self.notice(f"{entry.name}: at most {limit:.0f} s")

        def tell(kind: str, said: dict[str, Any]) -> None:
            (results if kind == "result" else failures).append(said)
            if kind == "failure":
                self.notice(f"{entry.name}: {said['what']} failed: {said['message']}")

        setting = Setting(self.rehearsal, limit, str(self.root), peaks_of(record), entry.model)
        if not self.rehearsal and entry.model not in (None, self._model):
            worker.close()  # nothing of another model is to be left in the device's memory
        self._model = entry.model or self._model
        end = worker.run(entry.module, setting, tell)
        status = "failed" if failures else "out of time" if end["out_of_time"] else "ok"
        self.notice(f"{entry.name}: {status} after {end['seconds']:.0f} s, {len(results)} results")
        return {**found, "status": status, **end}

    def _limit(self, number: int) -> float:
        """A share of what is left, among the sections that are left."""
        left = self.minutes * 60 - (time.monotonic() - self._began)
        waiting = sum(entry.share for entry in self.entries[number:])
        return left * self.entries[number].share / waiting


def peaks_of(record: dict[str, Any]) -> dict[str, float]:
    """The better of what was measured before and after, as a machine that others use, too, is slow at times."""
    best: dict[str, float] = {}
    for section in record["sections"]:
        for result in section["results"]:
            if result["kind"] == "peaks":
                for name, value in result["peaks"].items():
                    best[name] = max(value, best.get(name, 0.0))
    return best
