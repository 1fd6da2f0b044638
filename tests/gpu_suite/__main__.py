"""`python -m tests.gpu_suite`: progress on stderr, a table on stdout, a record in a folder.

It uses argparse, not typer: the dependencies of `batchinfer` may be missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Hashable, Sequence
from pathlib import Path

from tests.gpu_suite import ENTRIES
from tests.suite.record import Keeper
from tests.suite.run import ROOT, Suite
from tests.suite.section import SuiteEntry

PREPARE = "tests.gpu_suite.rehearsing"
RECORDS, REHEARSALS = Path("docs/measurements"), Path("results/gpu-suite")
MINUTES = 8.75  # default minutes of a run; with start and end it fits into nine
USAGE = 2
CALLS = ("tests", "kernels", "models")


def main() -> int:
    """Return 0 on success, 1 if a part failed or was not reached, 2 if nothing can run here."""
    given = _options()
    if not given.rehearse and (missing := _missing()) is not None:
        sys.stderr.write(f"gpu-suite: {missing}\n")
        return USAGE
    asked = CALLS if given.call is None else [given.call]
    chosen = selected(asked, given.sections)
    keeper = Keeper(given.out or ROOT / (REHEARSALS if given.rehearse else RECORDS), given.call)
    minutes = MINUTES * len(asked) if given.minutes is None else given.minutes
    if given.rehearse:
        return Suite(rehearsed(chosen), minutes, keeper, True, PREPARE).main()
    return Suite(chosen, minutes, keeper).main()


def selected(calls: Sequence[str], names: Sequence[str] | None = None) -> list[SuiteEntry]:
    """Return the sections of these commands, each once.

    Args:
        names: names of sections to keep, or None for all.
    """
    return [e for e in ENTRIES if set(e.calls) & set(calls) and e.name in (names or [e.name])]


def rehearsed(entries: Sequence[SuiteEntry]) -> list[SuiteEntry]:
    """Return the sections, except for repetitions with another model size."""
    first: dict[Hashable, SuiteEntry] = {}
    for entry in entries:
        model = entry.model
        first.setdefault((entry.source, model and (model.quantization, model.kv_cache)), entry)
    return list(first.values())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu_suite",
        description="Tests the GPU kernels on this machine's GPU, measures them and the engine, and writes a record.",
    )
    where = f"for the record; {RECORDS}, or {REHEARSALS} of a rehearsal"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=where)
    parser.add_argument("--call", choices=CALLS, help="one of the parts; all if not given")
    limit = f"for everything together; {MINUTES:g} for each call if not given"
    parser.add_argument("--minutes", type=float, help=limit)
    tiny = "everything on the CPU, on tiny shapes, in Triton's interpreter"
    parser.add_argument("--rehearse", action="store_true", help=tiny)
    names = [entry.name for entry in ENTRIES]
    only = f"only these of {', '.join(names)}"
    parser.add_argument("--sections", nargs="+", choices=names, metavar="NAME", help=only)
    return parser.parse_args()


def _missing() -> str | None:
    """Return the reason why nothing can be measured here, or None."""
    import torch

    if torch.cuda.is_available():
        return None
    return f"torch {torch.__version__} finds no GPU here; --rehearse runs everything on the CPU and times nothing"


if __name__ == "__main__":
    sys.exit(main())
