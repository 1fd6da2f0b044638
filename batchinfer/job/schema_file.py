"""The file that `output.schema_file` names: a JSON Schema."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from batchinfer.request import MAX_SCHEMA_BYTES

if TYPE_CHECKING:
    from batchinfer.job.spec import Job

_RIGHT = "{type: object, properties: {…}}"


def no_schema(value: object) -> str | None:
    """Why a value that was read from YAML or JSON is no schema for answers; None for a mapping."""
    if isinstance(value, dict):
        return None
    if value is True:
        return (
            f"found true, which allows any JSON; write what answers look like, as in {_RIGHT}, "
            "or give sampling.json_object: true for any object as text"
        )
    if value is False:
        return f"found false, which no answer can follow; write what answers look like, as in {_RIGHT}, or take it out"
    if isinstance(value, list | tuple):
        return (
            f"found a list; a JSON Schema is a mapping such as {_RIGHT}; "
            "for answers that are lists write {type: array, items: {…}}"
        )
    kind = "a number" if isinstance(value, int | float) else "text"
    return f"found {kind}; a JSON Schema is a mapping such as {_RIGHT}"


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
    if (problem := no_schema(schema)) is not None:
        raise job.mistake("output.schema_file", f"{path}: {problem}")
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return job.model_copy(update={"output": job.output.model_copy(update={"json_schema": text})})
