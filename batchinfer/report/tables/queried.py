"""The tables that `batchinfer query` opens: one declaration for the help, the prompt and docs/cli.md.

Imports nothing, because every start of the command line reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

QUERIED: Mapping[str, str] = MappingProxyType(  # the meaning of one row, by table
    {
        "results": "a row of the result",
        "run": "a run of the job",
        "history": "a run, with the figures by which runs are compared",
        "steps": "an engine step",
        "phases": "prefill, decode or mixed steps of a run",
        "buckets": "prompts of a run by length",
        "prefixes": "a prefix that requests share",
        "requests": "a request that finished",
        "rows": "a published row, and the request that answered it",
        "experts": "an expert of each layer",
        "ranks": "a rank of an engine that shards its model",
        "activities": "an interval in which a process did one thing",
        "accuracy": "a field of the answers, and how many were right",
        "confusion": "an expected label and an answered one, and how often they met",
        "calibration": "answers of similar probability, and how many were right",
    }
)
