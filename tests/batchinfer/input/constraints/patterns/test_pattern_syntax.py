"""Meaning of patterns: ECMAScript's classes, constructs of other languages, and properties."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.constraints.grammar import BadConstraint, check_grammar
from batchinfer.input.constraints.patterns import properties
from batchinfer.input.constraints.patterns.engine_syntax import engine_pattern
from batchinfer.input.constraints.patterns.source import BadPattern
from tests.batchinfer.input.constraints.patterns.ecmascript import matches
from tests.batchinfer.input.constraints.patterns.test_against_ecmascript import (
    LLMatcher,
    accepts,
    compiled,
    written,
)
from tests.examples import examples

# Syntax of Rust or other engines, but not ECMAScript, with the error text
FOREIGN = {
    "(?i)a": "(?i) at character 1 sets flags",
    "b(?x) a": "(?x) at character 2 sets flags",
    "(?i:a)": "(?i: at character 1 sets flags",
    "(?P<n>a)": "(?P< at character 1 is not ECMAScript; write (?<name>…)",
    "(?>a)": "(?> at character 1 is not ECMAScript; write (?:…)",
    r"\a": r"\a at character 1 is not ECMAScript; write \x07",
    r"\Ab": r"\A at character 1 is not ECMAScript; write ^",
    r"b\z": r"\z at character 2 is not ECMAScript; write $",
    r"\x{41}": r"\x{41} at character 1 is not ECMAScript; write \u{…}",
    r"\pL": r"\p at character 1 is not ECMAScript; write a property's name in braces",
    r"\p{greek}": r"write \p{Script=Greek}",
    r"\p{lowercase letter}": r"write \p{",
    "[[:alpha:]]": "[:alpha:] at character 2 is not ECMAScript; write the characters themselves",
    "[a-c&&[b]]": "&& at character 5 in a class is no intersection",
    "[a[b]]": "] at character 6 is not a literal character",
    "a++": "++ at character 2 repeats a repetition",
    "a{,3}": "{ at character 2 is not a literal character",
    r"\bword": "is a word boundary, which cannot be followed",
    r"(a)\1": r"\1 at character 4 refers to a group",
    "(?!a)b": "(?! at character 1 is look-ahead or look-behind",
    "a^b": "^ at character 2 matches at the start only",
    "(^a)*": "(^a)* at character 1 repeats an anchor",
    r"\ud800": "matches halves of surrogate pairs",
    "(" * 250 + ")" * 250: "is nested in more than 200 others",
}


@pytest.mark.parametrize(("pattern", "words"), FOREIGN.items())
def test_other_syntax_than_ecmascript_is_refused_with_an_alternative(pattern: str, words: str) -> None:
    with pytest.raises(BadPattern) as refused:
        engine_pattern(pattern)
    assert words in str(refused.value)
    for schema in ({"pattern": pattern}, {"patternProperties": {pattern: {}}}):
        with pytest.raises(BadConstraint):
            check_grammar(SamplingParams(json_schema=json.dumps({"type": ["string", "object"], **schema})))


SPACES = "\t\n\v\f\r \xa0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"


@pytest.mark.parametrize(("pattern", "texts", "others"), [
    (r"^\s$", SPACES, "\x85\u200b\u180e\x1c"),
    (r"^\S$", "\x85\u200b\u180e", SPACES),
    (r"^.$", "\x85a\U0001f600\x0b", "\n\r\u2028\u2029"),
    (r"^\d$", "09", "٣\U0001d7d9²"),
    (r"^\w$", "aZ_9", "éſ\u212aЯ"),
    (r"^\W$", "éſ\u212aЯ", "aZ_9"),
    (r"^[^\W\d]$", "aZ_", "é9"),
    (r"^\p{L}$", "aéЯ中", "1_ "),
    (r"^[\u{1F600}-\u{1F64F}]$", "\U0001f600", "\U0001f5ff"),
])  # fmt: skip
@pytest.mark.parametrize("searched", [True, False])
def test_classes_are_those_of_ecmascript(pattern: str, texts: str, others: str, searched: bool) -> None:
    ours = compiled(pattern, searched)
    assert isinstance(ours, LLMatcher)
    for char in texts + others:
        assert accepts(ours, written(char) if searched else char.encode()) == (char in texts), ascii(char)
    assert matches(pattern, list(texts + others)) == [char in texts for char in texts + others]


def test_properties_are_named_as_in_ecmascript_and_known_to_the_engine() -> None:
    names = [*properties._BINARY.split(), *properties._CATEGORIES.replace("/", " ").split()]
    scripts = properties._SCRIPTS.replace("/", " ").split()
    named = [f"{key}={one}" for one in scripts for key in ("Script", "scx")]
    for name in [*names, *named[:: examples(7, 1)]]:
        with_null = matches(f"\\p{{{name}}}", ["\0"])
        assert with_null is not None, name
        said = engine_pattern(f"\\p{{{name}}}")
        assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(said)), name
        assert [properties.holds_null(said[1:-1])] == with_null, name


@pytest.mark.parametrize(("schema", "words"), [
    ({"patternProperties": {r"^\d$": {}, "^[0-9]$": {}}}, "two patterns that say the same"),
    ({"patternProperties": {'^[^"]$': {}}}, "beside other properties"),
    ({"patternProperties": {'^[^"]$': {}}, "properties": {"\0": {}}, "additionalProperties": False}, "beside"),
])  # fmt: skip
def test_names_that_a_narrower_pattern_loses_are_refused(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConstraint, match=words):
        check_grammar(SamplingParams(json_schema=json.dumps({"type": "object", **schema})))
