"""Checks the sampling parameters of rows, which override the job's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import Field, fields, replace
from decimal import Decimal
from functools import lru_cache
from typing import Any

from batchinfer.core.exact_json import write_exactly
from batchinfer.core.sampling import (
    BOUNDS,
    CONSTRAINTS,
    DERIVED,
    INT32_MAX,
    MAX_ALLOWED,
    MAX_BAD_WORDS,
    MAX_SAMPLES,
    MAX_STOP_CHARS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    Bounds,
    SamplingParams,
)
from batchinfer.core.values.token_biases import token_biases
from batchinfer.input.constraints.generated_schema import parsed_schema
from batchinfer.input.constraints.schema_problem import BadSchema
from batchinfer.input.openai import CALL_FIELDS, ECHO, TEMPLATE_FIELDS, TOOLS
from batchinfer.input.prompts.parameters.request_fields import (
    HARMLESS,
    STRUCTURED,
    RequestParameters,
    has_no_effect,
    parameter_of,
    unsupported,
)
from batchinfer.input.rows import RowProblem, kind_of

SAMPLES = "n"  # the number of answers per row; it is not a parameter of an answer


def override(
    params: SamplingParams, given: Mapping[str, Any], columns: Mapping[str, str] | None = None
) -> SamplingParams:
    """Return the sampling parameters of a row: the job's parameters, overridden by the row's non-null values.

    Args:
        params: The parameters of the job.
        given: The values of the row by parameter.
        columns: The column of each parameter, for messages.

    Raises:
        RowProblem: A value is invalid; the message names the parameter and its column.
    """
    return _override(params, given, {name: _label(name, column) for name, column in (columns or {}).items()})


def _override(params: SamplingParams, given: Mapping[str, Any], labels: Mapping[str, str]) -> SamplingParams:
    found: dict[str, Any] = {}
    if given:
        found = {
            name: CHECKS[name](labels.get(name, name), value)
            for name, value in given.items()
            if value is not None
        }
    result = replace(_unconstrained(params, found, labels), **found) if found else params
    if result.min_tokens > result.max_tokens:
        raise _bad("min_tokens", f"{result.min_tokens} is more than max_tokens {result.max_tokens}")
    return result


def override_openai(params: SamplingParams, body: Mapping[str, Any], prompt_field: str) -> SamplingParams:
    """Return sampling parameters overridden by the fields of an OpenAI request.

    Args:
        params: The parameters for fields that the request does not set.
        body: The body of the request.
        prompt_field: The field of the prompt: "messages" for a chat request, else "prompt".

    Raises:
        RowProblem: A field is unknown or invalid, or the request asks for streaming.
    """
    asked, chat = RequestParameters(), prompt_field == "messages"
    logprobs = ("logprobs", "top_logprobs") if chat else ("logprobs",)
    for field, value in body.items():
        name = parameter_of(field)
        if value is None or field in (prompt_field, SAMPLES) or field in HARMLESS or field in logprobs:
            continue
        if chat and (field in TEMPLATE_FIELDS or (field in CALL_FIELDS and body.get(TOOLS))):
            continue  # the chat template and the tool choice read these
        if field in ("stream", "stream_options"):
            _check_stream(field, value)
        elif field == "response_format":
            for kind, asked_for in _response_format(value).items():
                asked.put(kind, asked_for, field)
        elif field == ECHO and not chat:
            _boolean(field, value)  # it only affects how the result is written
        elif field == STRUCTURED:
            asked.put_structure(value)
        elif name in CHECKS:
            asked.put(name, value, field)
        elif not has_no_effect(field, value, chat):
            raise unsupported(field)
    found = _override(params, asked.values, asked.fields)
    if all(body.get(field) is None for field in logprobs):
        return found
    if chat:
        return replace(found, logprobs=_chat_logprobs(body))
    most = _text_logprobs(body["logprobs"])
    if body.get(ECHO) is True and found.prompt_logprobs is None:  # the returned text includes the prompt
        return replace(found, logprobs=most, prompt_logprobs=most)
    return replace(found, logprobs=most)


def parse_samples(value: Any, column: str = SAMPLES) -> int | None:
    """Check the number of answers that a row asks for, and return it. None if the row has no value.

    Args:
        value: The value of the row.
        column: The column of the value, for messages.

    Raises:
        RowProblem: The value is no positive integer, or is too large.
    """
    if value is None:
        return None
    name = _label(SAMPLES, column)
    number = _integer(Bounds(1, INT32_MAX))(name, value)
    if number > MAX_SAMPLES:
        raise RowProblem(
            "n_over_limit", f"{name}: {number} is over the limit of {MAX_SAMPLES} answers to a row"
        )
    return number


def _chat_logprobs(body: Mapping[str, Any]) -> int | None:
    asked, most = body.get("logprobs"), body.get("top_logprobs")
    if asked is not None:
        _boolean("logprobs", asked)
    if not asked and most in (None, 0):
        return None
    if not asked:
        raise _bad("top_logprobs", "goes with logprobs: true")
    return 0 if most is None else CHECKS["logprobs"]("top_logprobs", most)


def _text_logprobs(asked: object) -> int | None:
    # Some clients write false for none
    return None if asked is False else CHECKS["logprobs"]("logprobs", asked)


def _unconstrained(
    params: SamplingParams, given: Mapping[str, Any], labels: Mapping[str, str]
) -> SamplingParams:
    named = [name for name in CONSTRAINTS if given.get(name)]
    if len(named) > 1:
        first, second = (labels.get(name, name) for name in named[:2])
        raise _bad(second, f"is given together with {first}; an answer can have only one constraint")
    return replace(params, **_NO_CONSTRAINT) if named else params


def _response_format(value: Any) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    inner = value.get("json_schema") if kind == "json_schema" else None
    if not isinstance(inner, Mapping) or "schema" not in inner:
        raise _bad(
            "response_format", "must be of type text, json_object or json_schema, the last with a schema"
        )
    return {"json_schema": inner["schema"]}


def from_text(name: str, value: Any) -> Any:
    """Convert a sampling parameter that a file without types (CSV) has as text to its proper type.

    Parameters that are texts themselves, such as `stop`, are returned unchanged. So are values that are no text.

    Args:
        name: The name of the parameter.
        value: Its value in the file.
    """
    if not isinstance(value, str) or name in ("stop", "regex", "grammar", "json_schema"):
        return value
    try:
        return json.loads(value if name in ("choice", "bad_words") else value.lower())
    except (ValueError, RecursionError):
        return value  # the check of the parameter reports the error


def _label(name: str, column: str) -> str:
    return name if name == column else f"{name} (column {column[:100]})"


def _check_stream(field: str, value: object) -> None:
    if value is not False:
        raise RowProblem("stream", f"body.{field}: a batch is not streamed; remove the field")


def _bad(name: str, message: str) -> RowProblem:
    return RowProblem("bad_parameter", f"{name}: {message}")


def _integer(bounds: Bounds) -> Callable[[str, Any], int]:
    low, high = bounds.low, bounds.high

    def check(name: str, value: Any) -> int:
        whole = not isinstance(value, bool) and isinstance(value, int | float | Decimal) and _is_whole(value)
        if not whole or not low <= value <= high:
            raise _bad(name, f"must be a whole number from {low} to {high}, not {_shown(value)}")
        return int(value)

    return check


def _is_whole(value: int | float | Decimal) -> bool:
    return math.isfinite(value) and value == int(value)


def _number(bounds: Bounds) -> Callable[[str, Any], float]:
    low, high, above = bounds.low, bounds.high, bounds.above

    def check(name: str, value: Any) -> float:
        numeric = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
        if not numeric or not math.isfinite(value) or not low <= value <= high or (above and value == low):
            least = "more than" if above else "at least"
            raise _bad(name, f"must be a number, {least} {low:g} and at most {high:g}, not {_shown(value)}")
        return float(value)

    return check


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = _texts(name, value)
    if len(stops) > MAX_STOPS:
        raise RowProblem("too_many_stops", f"{name}: {len(stops)} stop strings; the limit is {MAX_STOPS}")
    if any(not 0 < len(s) <= MAX_STOP_CHARS for s in stops):
        raise _bad(name, f"each stop string has 1 to {MAX_STOP_CHARS} characters")
    return stops


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(one, str) for one in texts):
        raise _bad(name, f"must be text or a list of texts, not {kind_of(value)}")
    return tuple(texts)


def _stop_tokens(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, list | tuple) and len(value) > MAX_STOP_TOKENS:
        raise RowProblem("too_many_stops", f"{name}: {len(value)} ids; the limit is {MAX_STOP_TOKENS}")
    return _token_ids(name, value)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise _bad(name, f"must be a list of token ids, not {kind_of(value)}")
    return tuple(_integer(Bounds(0, INT32_MAX))(name, v) for v in value)


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    try:
        return token_biases(value)
    except ValueError as error:
        raise _bad(name, f"{error}") from None


def _allowed(name: str, value: Any) -> tuple[int, ...]:
    ids = _token_ids(name, value)
    if not 0 < len(ids) <= MAX_ALLOWED:
        size = f"has {len(ids):,} ids" if ids else "is an empty list, which no answer can match"
        raise _bad(name, f"{size}; give 1 to {MAX_ALLOWED:,}, or write null")
    return ids


def _words(name: str, value: Any) -> tuple[str, ...]:
    words = _texts(name, value)
    if len(words) > MAX_BAD_WORDS:
        raise _bad(name, f"has {len(words)} texts; the limit is {MAX_BAD_WORDS}")
    if any(not 0 < len(word) <= MAX_STOP_CHARS for word in words):
        raise _bad(name, f"each text has 1 to {MAX_STOP_CHARS} characters")
    return words


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _bad(name, f"must be true or false, not {kind_of(value)}")
    return value


def _schema(name: str, value: Any) -> str:
    try:
        return _canonical(value if isinstance(value, str) else write_exactly(value))
    except (BadSchema, TypeError) as error:
        raise _bad(name, f"{error}") from None


@lru_cache(maxsize=64)
def _canonical(schema: str) -> str:
    # Cached, since rows usually have one of a few schemas
    return write_exactly(parsed_schema(schema))


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _bad(name, f"must be text, not {'empty' if value == '' else kind_of(value)}")
    return value


def _choice(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) and one for one in value):
        raise _bad(name, "must be a list of texts, none of them empty")
    if not value:
        raise _bad(name, "is an empty list, which no answer can match; list its texts, or write null")
    return tuple(value)


def _shown(value: object) -> str:
    number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    return str(value)[:40] if number else kind_of(value)


_OTHERS: Mapping[str, Callable[[str, Any], Any]] = {
    "stop": _stops,
    "stop_token_ids": _stop_tokens,
    "ignore_eos": _boolean,
    "include_stop": _boolean,
    "logit_bias": _biases,
    "allowed_token_ids": _allowed,
    "bad_words": _words,
    "json_schema": _schema,
    "json_object": _boolean,
    "regex": _text,
    "choice": _choice,
    "grammar": _text,
}


def _check_of(parameter: Field[Any]) -> Callable[[str, Any], Any]:
    if parameter.name in _OTHERS:
        return _OTHERS[parameter.name]
    kind = _number if isinstance(parameter.default, float) else _integer
    return kind(BOUNDS[parameter.name])


_NO_CONSTRAINT: dict[str, Any] = {
    one.name: one.default for one in fields(SamplingParams) if one.name in CONSTRAINTS
}
CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    one.name: _check_of(one) for one in fields(SamplingParams) if one.name not in DERIVED
}
