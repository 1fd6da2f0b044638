"""A run of a suite: each section has its share of the remaining time, and the record grows with each part."""

from __future__ import annotations

import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.suite.record import Keeper, described, peaks_of
from tests.suite.section import BenchModel, BenchSection, SuiteEntry
from tests.suite.shares import with_shares
from tests.suite.table import table
from tests.suite.worker import Lost, Reply, Worker

ROOT = Path(__file__).parents[2]
LEAST_S = 2.0  # remaining time below which no section starts
# A part is ended after this time and this share of its section, if the section has several parts and no
# model: its kernel hangs. It may wait for the compiler, and a first part for the GPU.
PART_S, PART_SHARE = 20.0, 1 / 3
GRACE_S = 3.0  # additional time for a part to end itself after its section's time
FAILED = 1


@dataclass(slots=True)
class Suite:
    """A run of a suite, whose record `keeper` writes whenever a part has ended."""

    entries: Sequence[SuiteEntry]
    minutes: float
    keeper: Keeper
    rehearsal: bool = False
    prepare: str | None = None  # a module that prepares each process
    given: Namespace = field(default_factory=Namespace)  # options of the sections
    _model: BenchModel | None = None  # the model that the present process has loaded
    _began: float = field(default_factory=time.monotonic)

    def main(self) -> int:
        """Run all sections, print the table, and return the exit code of the command."""
        record = self.run()
        print(f"{table(with_shares(record, peaks_of(record)))}\nrecord: {self.keeper.path}")
        return FAILED if record["failed"] else 0

    def run(self) -> dict[str, Any]:
        """Return the record, also after failures, which set `failed` in it."""
        record = {**described(ROOT, self.rehearsal), "minutes": self.minutes, "failed": True}
        sections: list[dict[str, Any]] = []
        record["sections"] = sections
        worker = Worker(self.prepare)
        try:
            for number in range(len(self.entries)):
                self._section(worker, number, record)
                record["failed"] = any(found["status"] != "ok" for found in sections)
                self.keeper.keep(record)
        finally:
            worker.close()
        return record

    def _section(self, worker: Worker, number: int, record: dict[str, Any]) -> None:
        entry, limit, began = self.entries[number], self.limit_s(number), time.monotonic()
        found: dict[str, Any] = {"name": entry.name, "limit_s": limit, "status": "begun", "seconds": 0.0}
        found |= {"results": [], "failures": [], "out_of_time": None}
        record["sections"].append(found)
        notice(f"{entry.name}: at most {limit:.0f} s")
        if not self.rehearsal and self._model not in (None, entry.model):
            worker.close()  # free the other model's device memory
        self._model = entry.model
        if limit < LEAST_S:
            found["out_of_time"] = "not begun"
        else:
            with tempfile.TemporaryDirectory(prefix="suite-") as place:
                facts = (peaks_of(record), entry.model, self.given, Path(place))
                section = BenchSection(self.rehearsal, began + limit, *facts)
                for answer in _answers(worker, entry, section, limit, found):
                    found["results"] += answer.results
                    found["failures"] += answer.failures
                    found["seconds"] = time.monotonic() - began
                    for failure in answer.failures:
                        notice(f"{entry.name}: {failure['what']} failed: {failure['message']}")
                    self.keeper.keep({**record, "failed": True})
        found["status"] = "failed" if found["failures"] else "out of time" if found["out_of_time"] else "ok"
        notice(f"{entry.name}: {found['status']} after {found['seconds']:.0f} s")

    def limit_s(self, number: int) -> float:
        """Return the section's share of the remaining time, among the remaining sections."""
        left = self.minutes * 60 - (time.monotonic() - self._began)
        return left * self.entries[number].share / sum(entry.share for entry in self.entries[number:])


def notice(line: str) -> None:
    """Print progress."""
    print(line, file=sys.stderr, flush=True)


def _answers(
    worker: Worker, entry: SuiteEntry, section: BenchSection, limit: float, found: dict[str, Any]
) -> Iterator[Reply]:
    """Yield the reply of each part until the section's time is over, which `found` records."""
    longest = limit + GRACE_S

    def ask(part: int | None, name: str) -> Reply:
        within_s = min(section.left_s + GRACE_S, longest)
        try:
            return worker.ask(entry.source, section, part, within_s)
        except Lost as lost:
            if section.left_s <= 0:
                found["out_of_time"] = f"{name} {lost}"
                return Reply()
            return Reply(failures=[{"what": name, "message": str(lost), "traceback": ""}])

    names = ask(None, entry.name)
    yield names
    if entry.model is None and len(names.names) > 1:
        longest = max(PART_S, PART_SHARE * limit)
    for number, name in enumerate(names.names):
        if section.left_s <= 0:
            found["out_of_time"] = found["out_of_time"] or f"not reached: {', '.join(names.names[number:])}"
            return
        yield ask(number, name)
