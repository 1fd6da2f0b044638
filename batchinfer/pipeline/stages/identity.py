"""The identity of a run's published result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from batchinfer.engine.config import NUMERICS_VERSION
from batchinfer.pipeline.open_run import OpenRun
from batchinfer.store.index.ingest import INGEST_FORMAT
from batchinfer.store.outputs.registry import DEFAULT_KIND
from batchinfer.store.results.manifest import PublishSpec


def publish_spec(run: OpenRun, context: bytes, inputs: Sequence[dict[str, Any]]) -> PublishSpec:
    """Return the identity of a run's result. A later run with an equal identity would publish the same result.

    Args:
        run: The run, with its job, options, state folder and report.
        context: The first part of all work keys, from `work_context`.
        inputs: The identities of the input files.
    """
    day = run.now.date().isoformat() if run.setup.tokenizer.may_write_date else ""
    adapters = f" {json.dumps(dict(run.setup.adapters))}" if run.setup.adapters else ""
    rest = f"{day} {INGEST_FORMAT}{_columns(run)}{adapters}"
    material = run.job.identity_json().encode() + context + rest.encode()
    identity = hashlib.sha256(material).hexdigest()
    rows = run.job.output.rows_per_file
    if run.job.sampling.chooses:  # all samples of a row must be in one file to choose the best
        rows = max(1, rows // run.job.rows_of_answers) * run.job.rows_of_answers
    return PublishSpec(run.job.name, identity, tuple(inputs), NUMERICS_VERSION, rows)


def _columns(run: OpenRun) -> str:
    # The first version of text output adds nothing, which keeps the identity of results from before kinds existed
    setup = run.setup
    kind, asked = setup.output, setup.requested
    read = asked.reasoning, asked.tool_calls, asked.embedding, asked.scoring, asked.pairs
    version = "" if (kind.name, kind.version) == (DEFAULT_KIND, 0) else f" {kind.name} {kind.version}"
    settings = (json.dumps(one.to_json(), sort_keys=True) for one in read if one is not None)
    return " ".join([version, *settings])
