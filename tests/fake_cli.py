"""The command line with the fake engine instead of the real one: `python -m tests.fake_cli run job.yaml`."""

from __future__ import annotations

from functools import partial

from batchinfer import cli
from batchinfer.pipeline import options
from batchinfer.pipeline.workers import standby

FAKE = "tests.fake_engine:build"


def main() -> None:
    """Run the command line in its own process, like `batchinfer.cli.main`."""
    options.RunOptions = partial(options.RunOptions, engine=FAKE)  # type: ignore[assignment,misc]
    standby.EngineStandby = partial(standby.EngineStandby, FAKE)  # type: ignore[assignment,misc]
    cli.main()


if __name__ == "__main__":
    main()
