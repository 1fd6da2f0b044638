"""The command `batchinfer run` with a short watchdog and four assumed cores, for tests that strike its
processes."""

from __future__ import annotations

import sys

from batchinfer.__main__ import main
from batchinfer.machine import facts
from batchinfer.pipeline.workers import replica

SILENT_S = 2.0

if __name__ == "__main__":
    replica.SILENT_S = SILENT_S
    facts.usable_cpus = lambda: 4
    sys.argv[1:1] = ["run", "-q"]
    main()
