"""Reads the JSON Schema in `output.schema_file`."""

from __future__ import annotations

from pathlib import Path

from batchinfer.core.exact_json import RepeatedName, read_exactly, write_exactly
from batchinfer.core.sampling import MAX_SCHEMA_BYTES

_RIGHT = "{type: object, properties: {…}}"


def no_schema(value: object) -> str | None:
    """Return why a value from YAML or JSON cannot be the JSON Schema of answers, or None. Only its type is checked."""
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


def read_schema_file(path: Path) -> str:
    """Read a file with a JSON Schema, and return the schema as compact JSON text.

    Raises:
        ValueError: The file cannot be read, is no JSON, or has no schema. The message is for users.
    """
    try:
        schema = read_exactly(path.read_bytes()[: MAX_SCHEMA_BYTES + 1])
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except RepeatedName as error:
        raise ValueError(f"{path} {error}") from None
    except (ValueError, RecursionError):
        whole = path.stat().st_size <= MAX_SCHEMA_BYTES
        why = "is not a JSON file" if whole else f"is over {MAX_SCHEMA_BYTES} bytes"
        raise ValueError(f"{path} {why}; it must hold one JSON Schema") from None
    if (problem := no_schema(schema)) is not None:
        raise ValueError(f"{path}: {problem}")
    return write_exactly(schema)
