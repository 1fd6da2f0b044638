"""The maximum number of tokens of an answer under a constraint, for `sampling.max_tokens: fit`.

A token has at least one byte, so the number of bytes bounds the number of tokens, plus one for the end token. Answers
are counted as grammar.py formats them: JSON in one line, with `, ` and `: `.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from batchinfer.core.sampling import INT32_MAX, SamplingParams
from batchinfer.input.constraints.generated_schema import generated_schema, parsed_schema
from batchinfer.input.constraints.patterns.width import NoWidth, in_json, pattern_width, plain
from batchinfer.input.constraints.schema_problem import BadSchema
from batchinfer.input.constraints.schema_references import References, UnknownReference

_MAX_DEPTH = 100
_ESCAPED = 6  # maximum bytes per character: an escape such as \u001f; unescaped characters have at most 4
_QUOTES = 2
_BETWEEN = 2  # bytes of `, ` and of `: `
_BRACKETS = 2
# Maximum length of a text in these formats, which need no escapes
_FORMATS = {"date": 10, "uuid": 36, "ipv4": 15, "ipv6": 45}
_UNESCAPED = frozenset((*_FORMATS, "date-time", "time", "duration", "hostname"))


class UnboundedAnswer(ValueError):
    """Raised if the length of an answer is unbounded. The message names the part without a bound, with advice."""


def most_tokens(params: SamplingParams) -> int:
    """Return the maximum number of tokens of an answer under the constraint of `params`, including the end token.

    Raises:
        UnboundedAnswer: There is no maximum.
    """
    if params.constraint is None:
        raise UnboundedAnswer("an answer without a constraint has no bound; give max_tokens a number")
    tokens = _BOUNDS[params.constraint](getattr(params, params.constraint)) + 1
    if tokens > INT32_MAX:
        raise UnboundedAnswer(
            f"an answer can need {tokens} tokens, more than max_tokens can be; bound it further"
        )
    return tokens


def _of_choice(texts: Sequence[str]) -> int:
    return max(len(text.encode("utf-8", "replace")) for text in texts)


def _of_regex(pattern: str) -> int:
    try:
        return pattern_width(pattern, plain, searched=False)
    except NoWidth as error:
        raise UnboundedAnswer(f"the regex has no bound: {error}") from None


def _of_object(_: bool) -> int:
    raise UnboundedAnswer(
        "any JSON object is allowed; give max_tokens a number, or a schema with named properties"
    )


def _of_grammar(_: str) -> int:
    raise UnboundedAnswer("the longest answer of a grammar is not known; give max_tokens a number")


def _of_calls(_: str) -> int:
    raise UnboundedAnswer("the longest call of a tool is not known; give max_tokens a number")


def _of_schema(text: str) -> int:
    try:
        schema = generated_schema(parsed_schema(text))
    except BadSchema as error:
        raise UnboundedAnswer(str(error)) from None
    return _SchemaBound(schema).most(schema, "")


_BOUNDS: Mapping[str, Callable[[Any], int]] = {
    "json_schema": _of_schema,
    "json_object": _of_object,
    "regex": _of_regex,
    "choice": _of_choice,
    "grammar": _of_grammar,
    "tool_call": _of_calls,
}


class _SchemaBound:
    """Computes the maximum number of bytes of a JSON value that matches a schema.

    A value must satisfy every keyword of the schema, so the smallest of the keywords' bounds applies.
    """

    def __init__(self, root: Any) -> None:
        self._references = References(root)
        self._results: dict[int, int | UnboundedAnswer] = {}  # by id of the schema
        self._open: list[int] = []

    def most(self, schema: Any, place: str) -> int:
        """Return the maximum number of bytes of a value that matches a schema. Raises Unbounded if there is no maximum.

        Args:
            schema: The schema or subschema, parsed.
            place: Its place in the whole schema, for messages.
        """
        if not isinstance(schema, dict):
            if schema is False:
                return 0
            raise _unbounded(place, "give its type")
        if id(schema) in self._open:
            raise _unbounded(place, "it contains itself; give max_tokens a number")
        if len(self._open) >= _MAX_DEPTH:
            raise _unbounded(place, f"it is nested more than {_MAX_DEPTH} deep; give max_tokens a number")
        if id(schema) not in self._results:
            self._open.append(id(schema))
            self._results[id(schema)] = self._least(schema, place)
            self._open.pop()
        if isinstance(found := self._results[id(schema)], UnboundedAnswer):
            raise found
        return found

    def _least(self, schema: dict[str, Any], place: str) -> int | UnboundedAnswer:
        bounds: list[int] = []
        problem: UnboundedAnswer | None = None
        for bound in self._bounds(schema, place):
            try:
                bounds.append(bound())
            except UnboundedAnswer as error:
                problem = problem or error
        return min(bounds) if bounds else problem or _unbounded(place, "give its type")

    def _bounds(self, schema: dict[str, Any], place: str) -> Iterator[Callable[[], int]]:
        if "const" in schema:
            yield lambda: _longest([schema["const"]])
        if isinstance(schema.get("enum"), list):
            yield lambda: _longest(schema["enum"])
        if "$ref" in schema:
            yield lambda: self._of_reference(schema["$ref"], place)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                yield lambda found=schema[keyword]: self._widest(found, place)  # type: ignore[misc]
        for one in found if isinstance(found := schema.get("allOf"), list) else ():
            yield lambda one=one: self.most(one, place)  # type: ignore[misc]
        if "type" in schema:
            yield lambda: self._of_types(schema, place)

    def _of_reference(self, reference: Any, place: str) -> int:
        try:
            return self.most(self._references.resolve(reference), place)
        except UnknownReference as error:
            raise _unbounded(place, str(error)) from None

    def _widest(self, schemas: Sequence[Any], place: str) -> int:
        return max((self.most(one, place) for one in schemas), default=0)

    def _of_types(self, schema: dict[str, Any], place: str) -> int:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return max((self._of_type(one, schema, place) for one in named), default=0)

    def _of_type(self, name: Any, schema: dict[str, Any], place: str) -> int:
        if name in ("null", "boolean"):
            return 4 if name == "null" else 5
        if name == "integer":
            return _of_integer(schema, place)
        if name == "number":
            return _of_number(schema, place)
        if name == "string":
            return _of_string(schema, place)
        if name == "array":
            return self._of_array(schema, place)
        if name == "object":
            return self._of_properties(schema, place)
        raise _unbounded(place, "its type is none of JSON Schema's")

    def _of_array(self, schema: dict[str, Any], place: str) -> int:
        first = found if isinstance(found := schema.get("prefixItems"), list) else []
        items, most = schema.get("items", True), _count(schema.get("maxItems"))
        most = len(first) if items is False and (most is None or most > len(first)) else most
        if most is None:
            raise _unbounded(place, "give maxItems")
        widths = [self.most(one, f"{place}[{at}]") for at, one in enumerate(first[:most])]
        total = sum(widths) + _BETWEEN * max(0, most - 1) + _BRACKETS
        further = most - len(widths)
        return total + further * self.most(items, f"{place}[]") if further else total

    def _of_properties(self, schema: dict[str, Any], place: str) -> int:
        named = found if isinstance(found := schema.get("properties"), dict) else {}
        if schema.get("additionalProperties") is not False or schema.get("patternProperties"):
            raise _unbounded(
                place,
                "name its properties, and give additionalProperties: false"
                if named
                else "name its properties",
            )
        total = _BRACKETS + _BETWEEN * max(0, len(named) - 1)
        for name, one in named.items():
            total += _longest([name]) + _BETWEEN + self.most(one, f"{place}.{name}" if place else name)
        return total


def _of_integer(schema: dict[str, Any], place: str) -> int:
    low, high = _limits(schema)
    if low is None or high is None:
        raise _unbounded(place, "give minimum and maximum")
    return max(len(str(math.floor(low))), len(str(math.ceil(high))), 2 if low < 0 else 1)


def _of_number(schema: dict[str, Any], place: str) -> int:
    # Only `multipleOf` limits the decimals of a number
    low, high = _limits(schema)
    step = schema.get("multipleOf")
    if low is None or high is None or not _is_number(step):
        raise _unbounded(
            place,
            "a number may have any number of decimals; give minimum, maximum and multipleOf, such as 0.01",
        )
    digits = max(len(str(math.floor(low))), len(str(math.ceil(high))), 2)
    exponent = Decimal(repr(step)).normalize().as_tuple().exponent
    return digits + 1 + max(0, -exponent if isinstance(exponent, int) else 0)


def _limits(schema: dict[str, Any]) -> tuple[Any, Any]:
    lows = [schema[name] for name in ("minimum", "exclusiveMinimum") if _is_number(schema.get(name))]
    highs = [schema[name] for name in ("maximum", "exclusiveMaximum") if _is_number(schema.get(name))]
    return max(lows, default=None), min(highs, default=None)


def _of_string(schema: dict[str, Any], place: str) -> int:
    form, pattern, why = schema.get("format"), schema.get("pattern"), "give maxLength"
    widths = [_FORMATS[form]] if isinstance(form, str) and form in _FORMATS else []
    if (most := _count(schema.get("maxLength"))) is not None:
        widths.append(most * (1 if isinstance(form, str) and form in _UNESCAPED else _ESCAPED))
    if isinstance(pattern, str):
        try:
            widths.append(pattern_width(pattern, in_json, searched=True))
        except NoWidth as error:
            why = f"give maxLength, or bound its pattern: {error}"
    if not widths:
        raise _unbounded(place, why)
    return min(widths) + _QUOTES


def _longest(values: Sequence[Any]) -> int:
    return max(
        (len(json.dumps(one, ensure_ascii=False).encode("utf-8", "replace")) for one in values), default=0
    )


def _count(value: Any) -> int | None:
    return int(value) if _is_number(value) and 0 <= value <= 2**53 else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _unbounded(place: str, advice: str) -> UnboundedAnswer:
    return UnboundedAnswer(f"{(place or 'the answer')[:200]}: {advice}")
