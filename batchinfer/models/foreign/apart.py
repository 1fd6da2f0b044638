"""Describes a model in a process of its own: the one that reads jobs stays free of torch. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.machine.asked_apart import Died, asked_apart
from batchinfer.models.foreign.refusal import CannotRun
from batchinfer.models.foreign.spec import ForeignSpec

PROBE = "batchinfer.models.foreign.probe:serve"
# Importing torch and transformers takes some 5 s, describing a model of a hundred layers less than 10
WITHIN_S = 300.0


def describe_apart(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ForeignSpec:
    """Describe a model as `probe.describe` does, in another process. Raises CannotRun, and what `asked_apart`
    raises."""
    what = "the process that looks at the model"
    try:
        found = asked_apart(what, PROBE, raw, generation, within_s=WITHIN_S)
    except Died as died:
        raise CannotRun("two processes that looked at it ended", str(died)) from died
    if isinstance(found, tuple):
        raise CannotRun(*found)
    described: ForeignSpec = found
    return described
