"""Random JSON Schemas, random answers that their grammars allow, and an oracle with exact numbers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from functools import cache
from ipaddress import ip_address
from typing import Any
from uuid import UUID

import jsonschema
import numpy as np
from jsonschema.validators import validator_for
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.constraints.grammar import BadConstraint, grammar_of

MOST_BYTES = 160  # limit of a random answer
EDGES = [0, 1, -1, 2, 3, 5, 0.5, -0.5, 0.1, 0.3, 1.0, 2.5, 1e-7, 1e15, 1e22, 2**53, 2**53 + 1, 2**53 + 3, 2**63 - 1,
         2**63, 2**64, -(2**53) - 1, -(2**63), 10**18, 10**18 + 1, 120.88995980580641, 0.36712383142708804,
         9007199254740993.0, 1e300, 5e-324]  # fmt: skip
STEPS = [1, 2, 3, 7, 10, 0.1, 0.25, 0.07, 0.5, 2.5, 0.01, 1e-7, 1000, 0.30000000000000004, 0, -1]
TEXTS = ["", "a", "b", "ab", 'q"\\', "ä😀", "\n", "\x01", "\x7f", "1"]
NAMES = ["a", "b", "cc", "ä", 'q"', "$ref", "type", ""]
LEGACY: list[dict[str, Any]] = [
    {"uniqueItems": True},
    {"contains": {"type": "null"}},
    {"contains": {"type": "null"}, "minContains": 0},
    {"dependentRequired": {}},
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {"required": ["b"]}}},
    {"nullable": True},
    {"exclusiveMinimum": True},
    {"additionalItems": {"type": "null"}},
    {"propertyNames": {"maxLength": 1}},
    {"unevaluatedProperties": False},
    {"if": {"type": "null"}, "then": False},
    {"not": {"type": "null"}},
    {"divisibleBy": 2},
    {"x-guidance": {"lenient": True, "coerce_one_of": True}},
    {"x-ours": {"type": "null"}},
    {"minlength": 2},
    {"minItems": 1.0},
    {"title": "t", "description": "d", "default": None, "examples": [1]},
]
DRAFTS = ["http://json-schema.org/draft-07/schema#",
          "https://json-schema.org/draft/2019-09/schema", "https://json-schema.org/draft/2020-12/schema"]  # fmt: skip


class SchemaMaker:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def document(self) -> dict[str, Any]:
        made = self._schema(3)
        pick = self._random
        if pick.random() < 0.7:
            made["$defs" if pick.random() < 0.9 else "definitions"] = {
                "x": self._schema(2),
                "y": self._schema(1),
            }
        if pick.random() < 0.1:
            made["$schema"] = pick.choice(DRAFTS)
        return made

    def _schema(self, depth: int) -> dict[str, Any]:
        pick = self._random
        kinds = [self._number, self._string, self._listed, self._plain]
        if depth:
            kinds += [self._object, self._object, self._array, self._combined, self._reference]
        made = pick.choice(kinds)(depth)
        if pick.random() < 0.12:
            made |= pick.choice(LEGACY)
        if depth and pick.random() < 0.08:
            made |= self._schema(depth - 1)
        items = list(made.items())
        if pick.random() < 0.3:
            pick.shuffle(items)
        return dict(items)

    def _plain(self, _: int) -> dict[str, Any]:
        return {"type": self._random.choice(["null", "boolean", ["boolean", "null"], ["null", "integer"]])}

    def _number(self, _: int) -> dict[str, Any]:
        pick = self._random
        made: dict[str, Any] = {"type": pick.choice(["integer", "number", ["integer", "string"], "number"])}
        if pick.random() < 0.05:
            del made["type"]
        low, high = sorted((self._bound(), self._bound()))
        if pick.random() < 0.6:
            made[pick.choice(["minimum", "exclusiveMinimum"])] = low
        if pick.random() < 0.6:
            made[pick.choice(["maximum", "exclusiveMaximum"])] = high
        if pick.random() < 0.2:
            made["multipleOf"] = pick.choice(STEPS)
        return made

    def _bound(self) -> float:
        pick = self._random
        near: float = pick.choice(EDGES)
        return near if pick.random() < 0.7 else round(pick.uniform(-20, 20), pick.choice([0, 1, 3, 15]))

    def _string(self, _: int) -> dict[str, Any]:
        pick = self._random
        made: dict[str, Any] = {"type": "string"}
        if pick.random() < 0.4:
            made["maxLength"] = pick.randint(0, 5)
        if pick.random() < 0.3:
            made["minLength"] = pick.choice([0, 1, 2, 2.0])
        if pick.random() < 0.4:
            made["format"] = pick.choice([*_CHECKS, "colour"])
            made.pop("maxLength", None)
        if pick.random() < 0.2:
            made["pattern"] = pick.choice(["^[a-c]{1,3}$", "b", "^2", "^[0-9a-f-]+$", "[^a]"])
        return made

    def _listed(self, _: int) -> dict[str, Any]:
        pick = self._random
        values = [
            pick.choice([*EDGES, *TEXTS, True, False, None, [1, "a"], {"a": 1.0}, [], {}]) for _ in range(3)
        ]
        made: dict[str, Any] = (
            {"const": values[0]} if pick.random() < 0.3 else {"enum": values[: pick.randint(0, 3)]}
        )
        if pick.random() < 0.3:
            made |= self._number(0)
        return made

    def _object(self, depth: int) -> dict[str, Any]:
        pick = self._random
        names = pick.sample(NAMES, pick.randint(0, 3))
        made: dict[str, Any] = {"type": "object", "properties": {n: self._schema(depth - 1) for n in names}}
        if pick.random() < 0.1:
            del made["type"]
        if pick.random() < 0.6:
            made["required"] = pick.sample(NAMES, 1) if pick.random() < 0.1 else names[: pick.randint(0, 3)]
        if pick.random() < 0.5:
            made["additionalProperties"] = pick.choice([False, False, True, self._schema(0)])
        if pick.random() < 0.15:
            made["patternProperties"] = {pick.choice(["^[ab]$", "^x", "c"]): self._schema(0)}
        if pick.random() < 0.15:
            made[pick.choice(["minProperties", "maxProperties"])] = pick.randint(0, 2)
        return made

    def _array(self, depth: int) -> dict[str, Any]:
        pick = self._random
        made: dict[str, Any] = {"type": "array", "maxItems": pick.randint(0, 3)}
        if pick.random() < 0.6:
            made["items"] = pick.choice([self._schema(depth - 1), False, [self._schema(depth - 1)]])
        if pick.random() < 0.4:
            made["prefixItems"] = [self._schema(depth - 1) for _ in range(pick.randint(0, 2))]
        if pick.random() < 0.2:
            made["minItems"] = pick.randint(0, 2)
        if pick.random() < 0.2:
            del made["maxItems"]
        if pick.random() < 0.1:
            made["additionalItems"] = pick.choice([False, self._schema(0)])
        return made

    def _combined(self, depth: int) -> dict[str, Any]:
        pick = self._random
        keyword = pick.choice(["anyOf", "oneOf", "allOf"])
        made: dict[str, Any] = {keyword: [self._schema(depth - 1) for _ in range(pick.randint(0, 2) or 2)]}
        return made | self._schema(depth - 1) if pick.random() < 0.3 else made

    def _reference(self, depth: int) -> dict[str, Any]:
        pick = self._random
        places = [*["#/$defs/x", "#/$defs/y"] * 4, "#/definitions/x", "#", "#/properties/a", "#/anyOf/0"]
        made: dict[str, Any] = {"$ref": pick.choice(places)}
        return made | self._schema(depth - 1) if pick.random() < 0.3 else made


@dataclass
class Counts:
    """Counts of schemas and texts that were tried."""

    followed: int = 0  # accepted schemas
    texts: int = 0
    wrong: list[tuple[str, str, str]] = field(default_factory=list)


@cache
def library() -> LLTokenizer:
    return LLTokenizer("byte")


def compiled(schema: Any) -> LLMatcher:
    """Compile a schema, given as an object or a text. Raises BadConstraint."""
    params = SamplingParams(json_schema=schema if isinstance(schema, str) else json.dumps(schema))
    made = LLMatcher(library(), grammar_of(params), log_level=0)
    made.compute_ff_tokens()
    made.compute_bitmask()
    if made.is_error():
        raise BadConstraint(made.get_error())
    return made


def drawn(grammar: LLMatcher, rng: random.Random) -> str | None:
    """Return an answer by a random walk over the mask, or None if it gets too long or is incomplete."""
    matcher, said = grammar.deep_copy(), bytearray()
    bits = allocate_token_bitmask(1, library().vocab_size)
    while not matcher.is_stopped() and len(said) < MOST_BYTES:
        fill_next_token_bitmask(matcher, bits)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
        if not allowed:
            return None
        token = rng.choice(_weighed(allowed, rng))
        if token < 256:
            said.append(token)
        matcher.consume_token(token)
    text = said.decode("utf-8", "replace")
    return text if accepts(grammar, text) else None


def _weighed(allowed: list[int], rng: random.Random) -> list[int]:
    """Return only the tokens that may end a value with probability 0.7, else all allowed tokens."""
    ends = [one for one in allowed if one >= 256 or chr(one) in '"]}0195.\\-']
    return ends if ends and rng.random() < 0.7 else allowed


def accepts(grammar: LLMatcher, text: str) -> bool:
    matcher, data = grammar.deep_copy(), list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and bool(matcher.is_accepting())


def exact(text: str) -> Any:
    """Parse JSON with exact numbers. Whole Decimals become ints, as JSON Schema defines."""
    return json.loads(text, parse_float=Decimal)


def problem(schema: Any, text: str) -> str | None:
    """Return why a text is not valid under a schema, or None. Compares numbers exactly."""
    root = _modern(exact(json.dumps(schema)))
    validator = _exact_validator(root)
    try:
        error = next(iter(validator.iter_errors(exact(text))), None)
    except RecursionError:  # the oracle's, for schemas that contain themselves at once
        return None
    return None if error is None else f"{error.message[:200]} ({error.validator})"


def _modern(schema: Any) -> Any:
    """Translate keywords of older drafts to draft 2020-12, which the oracle implements."""
    if isinstance(schema, list):
        return [_modern(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _modern(one) for name, one in schema.items()}
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        if made.get(name) is False:
            del made[name]
    if isinstance(made.get("items"), list):
        made["prefixItems"] = made.pop("items")
        if "additionalItems" in made:
            made["items"] = made["additionalItems"]
    made.pop("additionalItems", None)
    return made


def _exact_validator(root: Any) -> Any:
    base = validator_for(root, jsonschema.Draft202012Validator)
    checker = base.TYPE_CHECKER.redefine_many({"integer": _is_integer, "number": _is_number})
    kind = jsonschema.validators.extend(
        base, {"multipleOf": _multiple, "pattern": _pattern}, type_checker=checker, format_checker=_FORMATS
    )
    return kind(root, format_checker=_FORMATS)


def _is_integer(_: Any, one: Any) -> bool:
    return _is_number(_, one) and bool(one == int(one))


def _is_number(_: Any, one: Any) -> bool:
    return not isinstance(one, bool) and isinstance(one, int | Decimal)


def _multiple(_: Any, step: Any, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    if _is_number(_, value) and Fraction(value) % Fraction(step):
        yield jsonschema.ValidationError(f"{value} is no multiple of {step}")


def _pattern(_: Any, pattern: str, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(value, str) and not re.search(pattern.replace("$", r"\Z"), value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern}")


_FORMATS = jsonschema.FormatChecker(())
_DURATION = re.compile(r"P(?!$)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?)")
_URI = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:([A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*")
_OFFSET = re.compile(r"([Zz]|[+-]\d\d:\d\d)$")
_CHECKS: dict[str, Any] = {
    "date": lambda said: re.fullmatch(r"\d{4}-\d\d-\d\d", said) and date.fromisoformat(said),
    "date-time": lambda said: (_OFFSET.search(said) and said[10] in "Tt" and datetime.fromisoformat(said.upper())),
    "time": lambda said: _OFFSET.search(said) and datetime.fromisoformat(f"2000-01-02T{said}".upper()),
    "uuid": lambda said: str(UUID(said)) == said.lower(),
    "ipv4": lambda said: ip_address(said).version == 4,
    "ipv6": lambda said: ip_address(said).version == 6,
    "email": lambda said: "@" in said and len(said) <= 254 and len(said.split("@")[0]) <= 64,
    "hostname": lambda said: (len(said) <= 253 and all(re.fullmatch(r"(?!-)[a-zA-Z0-9-]{1,63}(?<!-)", one)
        for one in said.split("."))),
    "uri": _URI.fullmatch,
    "duration": _DURATION.fullmatch,
}  # fmt: skip
for _name, _check in _CHECKS.items():
    _FORMATS.checks(_name, ValueError)(
        lambda said, check=_check: not isinstance(said, str) or bool(check(said))
    )


_HUGE = re.compile(r"[eE][+-]?[0-9]{4}")  # numbers that take a Fraction too long


def named_twice(text: str) -> bool:
    found: list[bool] = []
    json.loads(text, object_pairs_hook=lambda pairs: found.append(len(dict(pairs)) < len(pairs)))
    return any(found)


def mutated(text: str, rng: random.Random) -> str:
    """Return a text with small random edits. It may no longer be JSON."""
    at = rng.randrange(len(text) + 1)
    put = rng.choice(["", "0", "1", "9", ".5", "-", "e3", '"', "\\u0061", "null", ", ", "\\ud83d\\ude00"])
    return text[:at] + put + text[at + rng.randint(0, 2) :]


def try_schema(schema: dict[str, Any], seed: int, counts: Counts, walks: int = 6) -> None:
    """Check a schema: it is refused, or all sampled answers are valid."""
    rng = random.Random(seed)
    try:
        grammar = compiled(schema)
    except BadConstraint:
        return
    counts.followed += 1
    texts = {found for _ in range(walks) if (found := drawn(grammar, rng)) is not None}
    texts = {text for text in texts if not _HUGE.search(text)}
    tried = texts | {near for text in texts for _ in range(4) if accepts(grammar, near := mutated(text, rng))}
    for text in tried:
        counts.texts += 1
        if named_twice(text) or _HUGE.search(text):  # answers with duplicate names are refused
            continue
        if (why := problem(schema, text)) is not None:
            counts.wrong.append((json.dumps(schema), text, why))
