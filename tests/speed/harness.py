"""The sections' registry and options, turns, medians, tables, watchers of memory, and the last line, which is JSON."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

from tests.suite.record import described

ROOT = Path(__file__).parents[2]
MACHINE = (
    "measured_at",
    "command",
    "cpu",
    "system",
    "versions",
    "git",
)  # facts of a record that stay in the last line
Measure = Callable[[Namespace, Path], Any]
Option = tuple[tuple[str, ...], dict[str, Any]]
Figures = Mapping[str, Any]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Section:
    """A measurement, which gets its options and an empty folder, and returns what the last line tells."""

    measure: Measure
    options: Sequence[Option]


SECTIONS: dict[str, Section] = {}


def option(*names: str, **settings: Any) -> Option:
    """Return an option or an argument as argparse takes it. The type follows from the default, if not given."""
    default = settings.get("default")
    several = isinstance(default, tuple)
    if default is not None:
        kind = type(default[0] if several else default)
        settings = {"type": kind, "help": "default: %(default)s", **settings}
    if several:
        settings["nargs"] = "+"
    return names, settings


def switch(name: str, help: str) -> Option:
    """Return an option that is on or off."""
    return (name,), {"action": "store_true", "help": help}


def rounds(default: int) -> Option:
    """Return the option that says how often everything is measured, in turns."""
    return option("--rounds", default=default, help="turns")


def section(name: str, *options: Option) -> Callable[[Measure], Measure]:
    """Declare a section. The docstring's first line is its line of the list."""

    def declare(measure: Measure) -> Measure:
        SECTIONS[name] = Section(measure, options)
        return measure

    return declare


def main() -> None:
    """Run the section that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.speed", description="Measure speed and memory.")
    parsers = parser.add_subparsers(dest="section", required=True, metavar="NAME")
    for name, each in sorted(SECTIONS.items()):
        text = str(each.measure.__doc__).replace("%", "%%")
        own = parsers.add_parser(
            name, help=text.splitlines()[0], description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )  # fmt: skip
        for names, settings in each.options:
            own.add_argument(*names, **settings)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="speed-") as place:
        found = SECTIONS[given.section].measure(given, Path(place))
    machine = described(ROOT, rehearsal=True)
    facts = {name: machine[name] for name in MACHINE}
    print(json.dumps({**vars(given), "machine": facts, "found": found}, default=str))


def in_turns(calls: Mapping[str, Callable[[int], Found]], count: int) -> dict[str, list[Found]]:
    """Make every call once in each round. A call gets the round's number. Progress goes to stderr."""
    found: dict[str, list[Found]] = {name: [] for name in calls}
    for number in range(count):
        for name, call in calls.items():
            found[name].append(call(number))
            print(f"round {number + 1}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    return found


def medians(runs: Sequence[Figures]) -> dict[str, Any]:
    """Return the median of each figure, rounded to four decimals; None where no run has it."""
    found: dict[str, Any] = {}
    for name in runs[0]:
        known = [run[name] for run in runs if run[name] is not None]
        found[name] = round(statistics.median(known), 4) if known else None
    return found


def spread(values: Iterable[float]) -> str:
    """Return a median, the least and the most."""
    known = sorted(values)
    return f"{statistics.median(known):.2f} ({known[0]:.2f}-{known[-1]:.2f})"


def ratios(first: Iterable[float], other: Iterable[float]) -> str:
    """Return how many times as long the first of each round takes as the other."""
    return spread(one / two for one, two in zip(first, other, strict=True))


def show(rows: Sequence[Figures]) -> None:
    """Print a table of figures. The first row names the columns."""
    lines = [list(rows[0]), *([_cell(row[name]) for name in rows[0]] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + " |")
    sys.stdout.flush()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) and value < 1000 else f"{value}"


def command_of(call: Callable[..., Any], *given: Any) -> list[str]:
    """Return the command of a process that makes a call of a module's function, whose arguments are JSON."""
    code = f"import json, sys; from {call.__module__} import {call.__name__} as call; call(*json.loads(sys.argv[1]))"
    return [sys.executable, "-c", code, json.dumps(given, default=str)]


def apart(call: Callable[..., Any], *given: Any) -> Any:
    """Call a function in a process of its own. Return its last line, which is JSON."""
    done = subprocess.run(command_of(call, *given), cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


class Growth:
    """Watches by how much a size grows while a block runs."""

    def __init__(self, read: Callable[[], int], every_s: float) -> None:
        self.most = 0
        self._read, self._every_s, self._before = read, every_s, read()
        self._stop = Event()
        self._thread = Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            self.most = max(self.most, self._read() - self._before)

    def __enter__(self) -> Growth:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class PhaseTimes:
    """Seconds, and seconds of CPU of all threads, by name."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[float, float]] = {}

    def timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a call that adds its times under this name."""

        def inner(*given: Any, **more: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                return call(*given, **more)
            finally:
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                before = self.found.get(name, (0.0, 0.0))
                self.found[name] = round(before[0] + wall, 2), round(before[1] + cpu, 2)

        return inner
