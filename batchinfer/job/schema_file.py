"""The file that `output.schema_file` names: a JSON Schema."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from batchinfer.request import MAX_SCHEMA_BYTES

if TYPE_CHECKING:
    from batchinfer.job.spec import Job


def with_schema_file(job: Job) -> Job:
    """The job with the schema in its `output.schema_file` as its `output.schema`. Raises JobFileError."""
    path = job.output.schema_file
    if path is None or job.output.json_schema is not None:
        return job
    try:
        schema = json.loads(path.read_bytes()[: MAX_SCHEMA_BYTES + 1])
    except OSError as error:
        raise job.mistake("output.schema_file", f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        why = (
            "is no JSON file"
            if path.stat().st_size <= MAX_SCHEMA_BYTES
            else f"is over {MAX_SCHEMA_BYTES} bytes"
        )
        raise job.mistake("output.schema_file", f"{path} {why}; it must hold one JSON Schema") from None
    if not isinstance(schema, dict | bool):
        raise job.mistake("output.schema_file", f"{path} holds no JSON Schema: that is an object")
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return job.model_copy(update={"output": job.output.model_copy(update={"json_schema": text})})
