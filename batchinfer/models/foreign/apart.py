"""Describes a model in a process of its own: the one that reads jobs stays free of torch. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.models.foreign.refusal import CannotRun
from batchinfer.models.foreign.spec import ForeignSpec
from batchinfer.spawning import Child, receiving

PROBE = "batchinfer.models.foreign.probe:serve"
# Importing torch and transformers takes some 5 s, describing a model of a hundred layers less than 10
WITHIN_S = 300.0


def describe_apart(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ForeignSpec:
    """See `probe.describe`. Raises CannotRun."""
    with Child(PROBE, raw, generation) as child:
        try:
            with receiving():
                found = child.connection.recv() if child.connection.poll(WITHIN_S) else None
        except EOFError as error:
            ended = child.wait(1.0)
            raise CannotRun("the process that looked at it ended", str(ended or "")) from error
    if found is None:
        raise CannotRun("to look at it took too long", f"{WITHIN_S:.0f} s")
    if isinstance(found, tuple):
        raise CannotRun(*found)
    described: ForeignSpec = found
    return described
