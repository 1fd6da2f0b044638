"""What a run's answers and its result are addressed by: the context of its work keys, the result's identity."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from batchinfer.data.index.ingest import INGEST_FORMAT
from batchinfer.data.results.manifest import PublishSpec
from batchinfer.data.storage.remembered import read_strings, write_strings
from batchinfer.engine.config import NUMERICS_VERSION
from batchinfer.pipeline.stages.open_run import OpenRun


def work_context(run: OpenRun) -> bytes:
    """Return the digest of all but the rows that decides an answer. Weight files are hashed once, then remembered."""
    digests = read_strings(run.state.fingerprints)
    before = dict(digests)
    context = run.setup.context(digests)
    if digests != before:
        with run.state.exclusively():
            write_strings(run.state.fingerprints, digests, run.state.ops)
    return context


def publish_spec(run: OpenRun, context: bytes, inputs: Sequence[dict[str, Any]]) -> PublishSpec:
    """Return what the published result of this job, over these input files, is known by."""
    day = run.now.date().isoformat() if run.setup.tokenizer.tells_the_day else ""
    material = run.job.identity_json().encode() + context + f"{day} {INGEST_FORMAT}".encode()
    identity = hashlib.sha256(material).hexdigest()
    return PublishSpec(run.job.name, identity, tuple(inputs), NUMERICS_VERSION, run.job.output.rows_per_file)
