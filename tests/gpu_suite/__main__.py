"""`python -m tests.gpu_suite`: progress to stderr, a table to stdout, a record to a folder.

argparse and not typer: this runs where `batchinfer` itself, with what its commands need, is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from tests.gpu_suite.shares import with_shares
from tests.gpu_suite.suite import CALLS, ENTRIES, Entry, Suite, peaks_of
from tests.gpu_suite.table import table

ROOT = Path(__file__).parents[2]
RECORDS, REHEARSALS = Path("docs/measurements"), Path("results/gpu-suite")
MINUTES = 8.75  # of a call: what starts before the first section, and ends behind the last, fits into nine
USAGE, FAILED = 2, 1


def main() -> int:
    """0 when all went well, 1 when anything failed or was not reached, 2 when it cannot run here."""
    options = _options()
    if not options.rehearse and (missing := _missing()) is not None:
        sys.stderr.write(f"gpu-suite: {missing}\n")
        return USAGE
    calls = CALLS if options.call is None else (options.call,)
    minutes = MINUTES * len(calls) if options.minutes is None else options.minutes
    entries = selected(calls, options.sections)
    if options.rehearse:
        entries = rehearsed(entries)
    folder = options.out or ROOT / (REHEARSALS if options.rehearse else RECORDS)
    keeper = Keeper(folder, options.call)
    suite = Suite(ROOT, options.rehearse, minutes, _notice, keeper.keep, entries)
    record = suite.run()
    sys.stdout.write(f"{table(with_shares(record, peaks_of(record)))}\nrecord: {keeper.path}\n")
    return FAILED if record["failed"] else 0


def selected(calls: Sequence[str], names: Sequence[str] | None = None) -> tuple[Entry, ...]:
    """Those of these commands, each once; of `names` alone if there are any."""
    return tuple(
        entry for entry in ENTRIES if set(entry.calls) & set(calls) and entry.name in (names or [entry.name])
    )


def rehearsed(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Without those that differ from one before in their model's size alone, since a rehearsal has one size."""
    first: dict[Hashable, Entry] = {}
    for entry in entries:
        first.setdefault((entry.module, entry.model and entry.model.codes), entry)
    return tuple(first.values())


class Keeper:
    """Writes the record to one file, again whenever it has grown: what was measured outlasts whatever comes."""

    def __init__(self, folder: Path, call: str | None = None) -> None:
        self._folder, self._call = folder, call
        self.path: Path | None = None

    def keep(self, record: dict[str, Any]) -> None:
        """Raises OSError."""
        if self.path is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = record_name(record) if self._call is None else f"{record_name(record)}-{self._call}"
            self.path = self._folder / f"{name}.json"
        text = json.dumps(with_shares(record, peaks_of(record)), indent=1, ensure_ascii=False)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(text + "\n", "utf-8")
        os.replace(temporary, self.path)


def record_name(record: dict[str, Any]) -> str:
    """Date, time (UTC) and GPU: `2026-11-21-1730-nvidia-h100-80gb-hbm3`."""
    at = str(record["measured_at"])
    gpu = "rehearsal" if record["rehearsal"] else (record["gpu"] or {}).get("name", "unknown gpu")
    return f"{at[:10]}-{at[11:13]}{at[14:16]}-{re.sub('[^a-z0-9]+', '-', str(gpu).lower()).strip('-')}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu_suite",
        description="Tests the GPU kernels on this machine's GPU, measures them and the engine, and writes a record.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help=f"for the record; {RECORDS}, or {REHEARSALS} of a rehearsal",
    )
    parser.add_argument("--call", choices=CALLS, help="one of the three parts; all if not given")
    parser.add_argument(
        "--minutes", type=float, help=f"for everything together; {MINUTES:g} for each call if not given"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="everything on the CPU, on tiny shapes, in Triton's interpreter",
    )
    names = [entry.name for entry in ENTRIES]
    parser.add_argument(
        "--sections", nargs="+", choices=names, metavar="NAME", help=f"only these of {', '.join(names)}"
    )
    return parser.parse_args()


def _missing() -> str | None:
    """Why nothing can be measured here; None where it can. Torch, slow to import, is asked in a process of its own by
    each section, and here only for this."""
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU here; --rehearse runs everything on the CPU and times nothing"
    return None


def _notice(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
