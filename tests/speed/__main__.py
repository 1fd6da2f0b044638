"""`python -m tests.speed NAME`: progress to stderr, a table to stdout, a record to a folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.speed import SECTIONS
from tests.suite.record import Keeper
from tests.suite.run import ROOT, Suite

RECORDS = ROOT / "results" / "speed"


def main() -> int:
    """Run the section that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.speed", description="Measures speed and memory.")
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for section in SECTIONS:
        own = names.add_parser(section.name, help=section.about, description=section.about)
        for flags, settings in section.options:
            own.add_argument(*flags, **settings)
        own.add_argument(
            "--out", type=Path, default=RECORDS, metavar="FOLDER", help="for the record; default: %(default)s"
        )
        own.add_argument("--minutes", type=float, default=600, help="limit; default: %(default)s")
    given = parser.parse_args()
    chosen = [section for section in SECTIONS if section.name == given.name]
    return Suite(chosen, given.minutes, Keeper(given.out, given.name), given=given).main()


if __name__ == "__main__":
    sys.exit(main())
