"""Derives the JSON Schema for generation from the user's schema.

The derived schema may be narrower: each answer that it allows is valid under the user's schema.
- Unsupported keywords are rejected, or omitted if they have no effect (schema_keywords.py).
- An object that does not mention further properties is closed (schema_closing.py).
- Numbers, patterns and formats are restricted to what llguidance follows exactly (narrow_values.py).
- Formats unknown to llguidance are omitted.

A change here may require a higher keys.CONSTRAINT_RULES; see there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

from batchinfer.core.exact_json import repeated_name, write_exactly
from batchinfer.core.sampling import MAX_SCHEMA_BYTES
from batchinfer.input.constraints.exact_numbers import check_multiples, is_exact, is_number
from batchinfer.input.constraints.narrow_values import narrow_value
from batchinfer.input.constraints.schema_closing import (
    combined_schemas,
    has_further_names,
    is_closable,
    sort_alternatives,
)
from batchinfer.input.constraints.schema_keywords import followed_schema
from batchinfer.input.constraints.schema_problem import BadSchema
from batchinfer.input.constraints.schema_references import References
from batchinfer.input.json_text import MAX_NESTING, nested_beyond

_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)
_UNWRITTEN = re.compile(r"\\u00[01]|\x7f")  # in JSON: control characters without a short escape
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs")
_SINGLE = ("items", "additionalProperties")


def parsed_schema(text: str) -> Any:
    """Parse a JSON Schema: an object, true or false. Numbers that no float represents exactly become Decimals.

    Raises:
        BadSchema: The text is not a JSON Schema, or exceeds a limit.
    """
    if len(text) > MAX_SCHEMA_BYTES or len(text.encode("utf-8", "replace")) > MAX_SCHEMA_BYTES:
        raise BadSchema(f"the schema is over the limit of {MAX_SCHEMA_BYTES} bytes")
    if nested_beyond(text, MAX_NESTING):
        raise BadSchema(f"the schema's lists and objects are nested more than {MAX_NESTING} deep")
    try:
        schema = _DECODER.decode(text)
        write_exactly(schema).encode()
    except BadSchema:
        raise
    except UnicodeEncodeError:
        raise BadSchema(
            "the schema has half of a surrogate pair, \\ud800 to \\udfff, which is no character"
        ) from None
    except ValueError:
        raise BadSchema("the schema is not JSON") from None
    if not isinstance(schema, dict | bool):
        raise BadSchema("a JSON Schema is an object")
    return schema


def generated_schema(schema: Any) -> Any:
    """Derive from the user's JSON Schema the schema that llguidance uses to constrain generation.

    Each value that the derived schema allows is valid under the user's schema, but not the reverse.

    Args:
        schema: The user's parsed schema. Not changed.

    Raises:
        BadSchema: llguidance cannot follow the schema exactly.
    """
    narrow = followed_schema(schema)
    schemas, references = list(subschemas(narrow)), References(narrow)
    combined = combined_schemas(schemas, references)
    kept, exclusive = sort_alternatives(schemas, references, combined)
    for one in exclusive:
        if "anyOf" not in one:  # llguidance recognises only few alternatives as exclusive
            one["anyOf"] = one.pop("oneOf")
    _check_multiples(schemas)
    for one in schemas:
        if isinstance(one.get("format"), str) and one["format"] not in _FORMATS:
            del one["format"]
        if id(one) not in kept and id(one) not in combined and is_closable(one):
            one["additionalProperties"] = False
            one.setdefault("type", "object")
        narrow_value(one)  # within a oneOf, too: it never makes alternatives look exclusive
    _check_spelling(schemas)
    return narrow


def _check_spelling(schemas: Sequence[dict[str, Any]]) -> None:
    # An escaped property name could occur again in another spelling
    listed = [one[keyword] for one in schemas for keyword in ("const", "enum") if keyword in one]
    if any(map(has_further_names, schemas)) and _UNWRITTEN.search(json.dumps(listed)):
        raise BadSchema(
            "const or enum has a text with a control character, while an object may have further properties; "
            "give the object additionalProperties: false"
        )


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a parsed schema and its subschemas at any depth. Subschemas that are true or false are skipped."""
    pending = [schema]
    while pending:
        one = pending.pop()
        if not isinstance(one, dict):
            continue
        yield one
        for keyword in _SINGLE:
            pending.append(one.get(keyword))
        for keyword in _LISTS:
            pending.extend(found if isinstance(found := one.get(keyword), list) else ())
        for keyword in _NAMED:
            pending.extend(found.values() if isinstance(found := one.get(keyword), Mapping) else ())


def _check_multiples(schemas: Sequence[dict[str, Any]]) -> None:
    if any(keyword in one for one in schemas for keyword in ("$ref", "allOf", "anyOf", "oneOf")):
        check_multiples(
            step for one in schemas if is_number(step := one.get("multipleOf")) and is_exact(step)
        )


def _number(digits: str) -> float | Decimal:
    """Parse a number: to a float if it is exactly the written number, else to a Decimal."""
    try:
        read, exact = float(digits), Decimal(digits)
    except InvalidOperation:
        raise BadSchema("the schema has a number whose exponent has more than 18 digits") from None
    return read if math.isfinite(read) and Decimal(repr(read)) == exact else exact


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise BadSchema(f"the schema has {repeated_name(pairs)!r} twice in one object; remove one")
    return found


def _no_number(name: str) -> NoReturn:
    raise BadSchema(f"the schema has {name}, which is no number of JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_once_each, parse_float=_number, parse_constant=_no_number)
