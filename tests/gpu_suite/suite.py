"""The sections in order of value, each with its share of the time, and the record that they make."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
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


SMALL, LARGE = Model("qwen2.5-0.5b"), Model("llama-3.1-8b")
LARGE_BESIDE = Model("llama-3.1-8b", 0.45)  # what it is compared with needs as much
# Few rows, which are captured soon
CODED = partial(Model, "llama-3.1-8b", rows=64, longest=4352)
CALLS = ("tests", "kernels", "models")
# In three commands, each of nine minutes; the most valuable of each first. Shares are seconds; they are estimates until
# they have been seen on a GPU.
ENTRIES = (
    Entry.of("tests", "tests", 520, "kernel_tests"),
    Entry.of("kernels models", "peaks", 15),
    Entry.of("kernels", "attention", 110),
    Entry.of("kernels", "tiles", 180),
    Entry.of("kernels", "matmul", 120),
    Entry.of("kernels", "pointwise", 30),
    Entry.of("kernels", "sampling", 45),
    Entry.of("models", "small-steady", 50, "workloads", SMALL),
    Entry.of("models", "small-profile", 10, "profile", SMALL),
    Entry.of("models", "small-mixed", 10, "mixed", SMALL),
    Entry.of("models", "small-launching", 15, "launching", SMALL),
    Entry.of("models", "model", 60, "model", LARGE),
    Entry.of("models", "steady", 85, "workloads", LARGE),
    Entry.of("models", "profile", 25, "profile", LARGE),
    Entry.of("models", "launching", 30, "launching", LARGE),
    Entry.of("models", "mixed", 15, "mixed", LARGE),
    Entry.of("models", "model-fp8", 45, "model", CODED(quantization="stored")),
    Entry.of("models", "model-kv-fp8", 30, "model", CODED(kv_cache="fp8")),
    Entry.of("models", "model-kv-int8", 30, "model", CODED(kv_cache="int8")),
    Entry.of("models", "against", 85, "against", LARGE_BESIDE),
    Entry.of("kernels models", "peaks-again", 20, "peaks"),
)


@dataclass(slots=True)
class Suite:
    """A run of the suite. `changed` hears of the record whenever something has come of a section."""

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
        entry, limit, began = self.entries[number], self._limit(number), time.monotonic()
        results: list[dict[str, Any]] = []
        failures: list[dict[str, Any]] = []
        found = {"name": entry.name, "limit_s": limit, "results": results, "failures": failures}
        if limit < LEAST_S:
            self.notice(f"{entry.name}: no time left")
            return {**found, "status": "out of time", "seconds": 0.0, "out_of_time": "not begun"}
        self.notice(f"{entry.name}: at most {limit:.0f} s")

        def tell(kind: str, said: dict[str, Any]) -> None:
            (results if kind == "result" else failures).append(said)
            begun = {**found, "status": "begun", "seconds": time.monotonic() - began, "out_of_time": None}
            self.changed({**record, "failed": True, "sections": [*record["sections"], begun]})
            if kind == "failure":
                self.notice(f"{entry.name}: {said['what']} failed: {said['message']}")

        setting = Setting(self.rehearsal, limit, str(self.root), peaks_of(record), entry.model)
        if not self.rehearsal and self._model not in (None, entry.model):
            worker.close()  # nothing of another model is to be left in the device's memory
        self._model = entry.model
        end = worker.run(entry.module, setting, tell)
        while (skip := end.pop("lost_at", 0)) and (left := limit - (time.monotonic() - began)) >= LEAST_S:
            self.notice(f"{entry.name}: goes on in another process")
            end = worker.run(entry.module, replace(setting, seconds=left, skip=skip), tell)
        end = {**end, "seconds": time.monotonic() - began}
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
