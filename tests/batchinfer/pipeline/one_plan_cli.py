"""The command line with the fake engine and one plan, as night_times.py measures it: with waves, reading is part of the
engine's time."""

from __future__ import annotations

import math
from functools import partial

from batchinfer.pipeline import options
from tests import fake_cli


def main() -> None:
    """As `batchinfer.cli.main`."""
    options.RunOptions = partial(options.RunOptions, waves_from_s=math.inf)  # type: ignore[assignment,misc]
    fake_cli.main()


if __name__ == "__main__":
    main()
