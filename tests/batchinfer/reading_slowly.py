"""The command `batchinfer` with an input that is read more slowly than models load: rows run in waves.

python -m tests.batchinfer.reading_slowly batchinfer run job.yaml
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from dataclasses import replace
from functools import partial

from batchinfer import cli
from batchinfer.pipeline import options
from batchinfer.pipeline.plans import waves
from batchinfer.store.index.ingest import Ingestion, IngestProgress

AT_A_TIME, EACH_S = 20, 0.7  # rows that are read at a time, seconds


def main() -> None:
    steps = Ingestion.steps

    def slow(self: Ingestion) -> Generator[IngestProgress, None, None]:
        self._options = replace(self._options, chunk=replace(self._options.chunk, lines=AT_A_TIME))
        for at in steps(self):
            yield at
            time.sleep(EACH_S)

    Ingestion.steps = slow  # type: ignore[method-assign]
    waves.MOST_AGAIN, waves.LEAD_S = 1.0, 1.0
    options.RunOptions = partial(options.RunOptions, waves_from_s=0.0)  # type: ignore[assignment,misc]
    sys.argv = sys.argv[1:]
    cli.main()


if __name__ == "__main__":
    main()
