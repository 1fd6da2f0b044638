"""The sections in order of value, each with its share of the time, and the record that they make."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu_suite.machine import describe
from tests.gpu_suite.section import Setting
from tests.gpu_suite.worker import Worker

PLACE = "tests.gpu_suite"
LEAST_S = 2.0  # with less left a section is not begun


@dataclass(frozen=True, slots=True)
class Entry:
    """A section: its module, and how much of the time it may have. What one leaves over goes to those behind it."""

    name: str
    share: float
    module: str

    @classmethod
    def of(cls, name: str, share: float, module: str | None = None) -> Entry:
        return cls(name, share, f"{PLACE}.{module or name}")


# Correct first; then the peaks, which all shares need; then what has targets; what repeats known things comes last.
# Shares are seconds of nine minutes; they are estimates until they have been seen on a GPU.
ENTRIES = (
    Entry.of("tests", 120, "kernel_tests"),
    Entry.of("peaks", 20),
    Entry.of("attention", 75),
    Entry.of("model", 80),
    Entry.of("against", 85),
    Entry.of("workloads", 55),
    Entry.of("matmul", 60),
    Entry.of("pointwise", 20),
    Entry.of("sampling", 20),
    Entry.of("peaks-again", 10, "peaks"),
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

        setting = Setting(self.rehearsal, limit, str(self.root), peaks_of(record))
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
