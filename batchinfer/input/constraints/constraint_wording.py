"""Rewords llguidance's messages for the author of a constraint: the mistake, its place, and a correction."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
# Maximum number of subschemas that are checked one by one to locate a problem, at 1 ms each
_MOST_PARTS = 200
_REGEX = "regex parse error:"
# (pattern of llguidance's message, our wording)
_REWORDINGS: tuple[tuple[str, str], ...] = (
    (
        r".*: look-around, .*",
        "look-ahead and look-behind, as in (?=…) and (?<=…), cannot be followed; leave them out",
    ),
    (
        r".*: backreferences .*",
        "a reference to a group, as in \\\\1, cannot be followed; write the group's expression again",
    ),
    (
        r"Pointer '(.*)' does not exist",
        r"its $ref names #\1, and there is no such part; correct it or add the part",
    ),
    (
        r"Resource '(.*)' is not present.*",
        r"its $ref names another document, \1; only this one is read, so copy the part into $defs and use that",
    ),
    (
        r"Unimplemented keys: \[(.*)\]",
        r"\1 cannot be followed; remove it, and check the answers for it afterwards",
    ),
    (
        r"oneOf constraints are not supported.*",
        "the alternatives of its oneOf overlap, or cannot be distinguished; write anyOf, or give each a required "
        "property with a const of its own",
    ),
    (r"Unsatisfiable schema: (.*)", r"no answer can follow it: \1"),
    (
        r"NoExtensionBias.*",
        "no answer can follow it: a part of it needs itself without end, or allows nothing",
    ),
    (r"no start rule found", "it has no rule named start, where an answer begins; name one so"),
    (r"No 'root' rule found", "it has no rule named root, where an answer begins; name one so"),
    (
        r"Rule '(.*)' not found",
        r"it has no rule named \1, which another one uses; add it or correct the name",
    ),
    (
        r'(?:at )?(\d+)\(\d+\): unknown name: "(\w+)".*',
        r"line \1: there is no rule named \2; add it or correct the name",
    ),
    (r"(\d+)\((\d+)\): lexer error.*", r"line \1, column \2: this is not understood; is a quote not closed?"),
    (r"(?:at )?(\d+)\((\d+)\): (.*?)(?: \d+ \| .*)?", r"line \1, column \2: \3"),
    (
        r"lexer precomputation failed.*",
        "it takes too much work to follow; make it simpler: repeat less, or shorter parts",
    ),
    (
        r".*\(grammar\) too big.*",
        "it takes too much work to follow; make it simpler: fewer properties, or shorter parts",
    ),
    (
        r".*Current row has \d+ items.*",
        "too many of its parts match at one position; make it less ambiguous",
    ),
    (r".*maximum recursion depth exceeded.*", "its rules lead too deep into one another; make it flatter"),
)


def reword_message(problem: str) -> str:
    """Reword a message of llguidance for users, in one line of at most 300 characters."""
    lines = [line.strip() for line in problem.replace("<non-verbose/>", "").splitlines() if line.strip()]
    # The message about a regex first quotes it, then has a line with the error
    error = next((line for line in lines[1:] if line.startswith("error: ")), None)
    text = " ".join(lines[:3]) or "the grammar cannot be used"
    if error is not None and _REGEX in lines[0]:
        text = f"the regular expression cannot be read: {error.removeprefix('error: ')}"
    text = _with_types(next((_reword(text, *one) for one in _REWORDINGS if re.match(one[0], text)), text))
    return text if len(text) <= 300 else f"{text[:300]} …"


def _reword(text: str, pattern: str, ours: str) -> str:
    return re.sub(f"{pattern}$", ours, text, count=1, flags=re.DOTALL)


def _with_types(text: str) -> str:
    if (found := re.fullmatch(r"Invalid type: (.*)", text)) is None:
        return text
    near = difflib.get_close_matches(found[1], _TYPES, 1)
    right = f"did you mean {near[0]}?" if near else f"there are {', '.join(_TYPES)}"
    return f"{found[1][:40]!r} is no type; {right}"


def faulty_place(schema: Any, problem_of: Callable[[Any], str | None]) -> str:
    """Return the place of the innermost part of a JSON Schema that alone has the same problem as the whole schema.

    Args:
        schema: The parsed schema, which has a problem.
        problem_of: Returns the problem of a schema, or None.

    Returns:
        A place such as "properties.a.items"; "" if only the whole schema has the problem.
    """
    if not isinstance(schema, Mapping):
        return ""
    problem, place = problem_of(schema), ""
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    parts = [one for _, one in zip(range(_MOST_PARTS + 1), _parts(schema, ""), strict=False)]
    for at, part in parts if len(parts) <= _MOST_PARTS else []:
        alone = {**definitions, **part} if isinstance(part, Mapping) else part
        if len(at) > len(place) and problem_of(alone) == problem:
            place = at
    return place


def _parts(schema: Any, place: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, Mapping):
        return
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        named = schema.get(keyword)
        for name, one in named.items() if isinstance(named, Mapping) else ():
            yield from _part(f"{place}{keyword}.{name}", one)
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        listed = schema.get(keyword)
        for number, one in enumerate(listed) if isinstance(listed, list) else ():
            yield from _part(f"{place}{keyword}[{number}]", one)
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            yield from _part(f"{place}{keyword}", schema[keyword])


def _part(place: str, schema: Any) -> Iterator[tuple[str, Any]]:
    yield place, schema
    yield from _parts(schema, f"{place}.")
