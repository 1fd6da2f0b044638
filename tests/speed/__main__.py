"""Run one section, whose name is the first argument."""

from __future__ import annotations

import sys
from importlib import import_module

from tests.speed.harness import main

# Processes start with the peak memory of the one that starts them, so only the module of the section is imported
MODULES = {
    "draft_bounds": ("draft-bounds",),
    "drafted_jobs": ("drafted-jobs",),
    "drafts": ("beside", "drafts", "trees"),
    "ingest": ("ingest",),
    "jobs": ("nights", "waves", "whole"),
    "kernels": ("layer",),
    "loading": ("load", "memory"),
    "peers": ("peers",),
    "planning": ("planning",),
    "ranks": ("ranks",),
}

if __name__ == "__main__":
    asked = [module for module, names in MODULES.items() if set(names) & set(sys.argv[1:2])]
    for module in asked or MODULES:
        import_module(f"tests.speed.{module}")
    main()
