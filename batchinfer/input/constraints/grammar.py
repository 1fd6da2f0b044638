"""Compiles the constraints of sampling parameters to llguidance grammars, with limits on size and work.

docs/measurements/constraints.md explains the choice of llguidance. Import this module only when a constraint occurs:
the library takes 8 MB.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from batchinfer.core.exact_json import write_exactly
from batchinfer.core.sampling import SamplingParams
from batchinfer.input.constraints.constraint_wording import faulty_place, reword_message
from batchinfer.input.constraints.generated_schema import generated_schema, parsed_schema, subschemas
from batchinfer.input.constraints.patterns.engine_syntax import engine_pattern
from batchinfer.input.constraints.patterns.schemas import translate_patterns
from batchinfer.input.constraints.schema_closing import has_further_names
from batchinfer.input.constraints.schema_problem import BadSchema

MAX_GRAMMAR_CHARS = 1 << 18
MAX_GROUPS = 200  # maximum nesting of brackets in a regex or grammar
# These limits allow about 0.5 s to compile a grammar, 15 ms per mask, and 100 MB. Ordinary schemas take 2 ms and 50 us.
# A long text that must be an e-mail address and a host name needs 60,000 lexer states or more. Verbose errors would
# quote the answer.
LIMITS = LLParserLimits(max_lexer_states=200_000, max_grammar_size=200_000, verbose_errors=False)
# In an ambiguous grammar each token takes longer than the one before: up to 150 ms with 2,000 items in a row of the
# parser, and 30 ms with 500. Schemas get the default, since an object with 500 optional properties needs 2,000
_AMBIGUOUS = LLParserLimits(
    max_lexer_states=200_000,
    max_grammar_size=200_000,
    verbose_errors=False,
    max_items_in_row=500,
    step_max_items=4_000,
)
# Bytes; 4 MiB are enough for a chain of 400 references in a schema, or of 800 rules in a grammar
CHECK_STACK_BYTES = 4 << 20
STACK_BYTES = 4 * CHECK_STACK_BYTES
# JSON as Python's json.dumps writes it, the most common form in training data
_WRITTEN: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
# Without \\u each character has one spelling, so a property name cannot occur again in another spelling
_ONE_SPELLING: Any = {**_WRITTEN, "json_allowed_escapes": 'nrbtf\\"'}
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


class BadConstraint(ValueError):
    """Raised if a constraint cannot be compiled.

    The message names the kind of constraint (such as regex) and the problem.
    """


def grammar_of(params: SamplingParams) -> str:
    """Convert the constraint of `params` to a grammar in llguidance's JSON format, without compiling it.

    Most mistakes of a constraint are only found when the grammar is compiled.

    Raises:
        BadConstraint: The constraint is too long or malformed.
    """
    try:
        return _make(params)
    except BadConstraint as error:
        raise BadConstraint(f"{params.constraint}: {error}") from None


def _make(params: SamplingParams) -> str:
    name = params.constraint
    if name is None:
        raise ValueError("these parameters have no constraint")
    try:
        return _MAKERS[name](getattr(params, name))
    except (BadSchema, ValueError) as error:
        raise BadConstraint(reword_message(str(error))) from None


def limits_of(params: SamplingParams) -> LLParserLimits:
    """Return the limits on size and work for llguidance to compile the constraint of `params` and compute its masks."""
    return LIMITS if params.grammar is None else _AMBIGUOUS


def compile_constraint(
    params: SamplingParams, tokenizer: LLTokenizer, stack_bytes: int = STACK_BYTES
) -> LLMatcher:
    """Compile the constraint of `params` for a tokenizer.

    Args:
        params: The parameters with the constraint.
        tokenizer: llguidance's tokenizer.
        stack_bytes: The stack size of the thread that compiles. A deeply nested constraint needs a large stack.

    Raises:
        BadConstraint: The constraint is invalid or exceeds a limit.
    """
    grammar, limits = grammar_of(params), limits_of(params)
    made: LLMatcher = _on_stack(
        stack_bytes, lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    )
    _refuse_failed(params, made)
    return made


def check_grammar(params: SamplingParams, tokenizer: LLTokenizer | None = None) -> None:
    """Raise BadConstraint if the constraint of `params` cannot be compiled, or allows no first token.

    A constraint that is nested too deeply crashes the calling process. Engines compile with a larger stack, so a
    constraint that passes this check does not crash them.

    Args:
        params: The parameters with the constraint.
        tokenizer: llguidance's tokenizer. None to check without one; the first token is then not checked.
    """
    if (problem := _problem(params)) is not None:
        raise BadConstraint(f"{params.constraint}: {_place(params)}{problem}")
    if tokenizer is not None:
        made = compile_constraint(params, tokenizer, CHECK_STACK_BYTES)
        made.compute_ff_tokens()
        made.compute_bitmask()
        _refuse_failed(params, made)


def _problem(params: SamplingParams) -> str | None:
    try:
        grammar, limits = _make(params), limits_of(params)
    except BadConstraint as error:
        return str(error)
    wrong, problems = _on_stack(
        CHECK_STACK_BYTES, lambda: LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    )
    return reword_message(problems[0]) if wrong else None


def _place(params: SamplingParams) -> str:
    if params.json_schema is None:
        return ""
    try:
        place = faulty_place(parsed_schema(params.json_schema), _of_part)
    except BadSchema:
        return ""
    return f"{place}: " if place else ""


def _of_part(schema: Any) -> str | None:
    return _problem(SamplingParams(json_schema=write_exactly(schema)))


def _refuse_failed(params: SamplingParams, made: LLMatcher) -> None:
    if made.is_error():
        raise BadConstraint(f"{params.constraint}: {reword_message(made.get_error())}")


def _on_stack(size: int, call: Callable[[], Any]) -> Any:
    """Return the result of `call`, run in a thread with a stack of `size` bytes."""
    before = threading.stack_size(size)
    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result()
    finally:
        threading.stack_size(before)


def _of_schema(text: str) -> str:
    schema, overrides = _generated(text)
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)


def _of_calls(text: str) -> str:
    # `text` is JSON: `lark` is the syntax of the calls, and `schemas` are the tools' arguments, its rules a0, a1 …
    source = json.loads(text)
    rules = [source["lark"]]
    for number, one in enumerate(source["schemas"]):
        schema, options = _generated(one)
        rules.append(f"a{number}: %json {json.dumps({**schema, 'x-guidance': options})}")
    return LLMatcher.grammar_from_lark("\n".join(rules))


def _generated(text: str) -> tuple[Any, Any]:
    schema = parsed_schema(text)
    if schema is False:
        raise BadSchema("the schema is false, which no answer can follow; write what answers look like")
    schema = {} if schema is True else generated_schema(schema)
    translate_patterns(subschemas(schema))
    overrides = _ONE_SPELLING if any(map(has_further_names, subschemas(schema))) else _WRITTEN
    return schema, overrides


def _of_object(_: bool) -> str:
    return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_WRITTEN)


def _of_regex(pattern: str) -> str:
    _check_size(pattern)
    return LLMatcher.grammar_from_regex(engine_pattern(pattern))


def _of_choice(texts: tuple[str, ...]) -> str:
    _check_size("".join(texts))
    # A terminal, because with alternatives of a rule 2,000 texts take 16 ms per mask, and more are rejected
    return LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(json.dumps(text) for text in texts))


def _of_grammar(text: str) -> str:
    _check_size(text)
    return LLMatcher.grammar_from_lark(_lark_of(text) if _GBNF.search(text) else text)


def _lark_of(gbnf: str) -> str:
    try:
        return gbnf_to_lark(gbnf)
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for a missing rule
        raise BadConstraint(reword_message(str(error))) from None


def _check_size(text: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise BadConstraint(f"it is over the limit of {MAX_GRAMMAR_CHARS} characters")
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_GROUPS:
        raise BadConstraint(f"more than {MAX_GROUPS} of its brackets are open at once")


_MAKERS: Mapping[str, Callable[[Any], str]] = {
    "json_schema": _of_schema,
    "json_object": _of_object,
    "regex": _of_regex,
    "choice": _of_choice,
    "grammar": _of_grammar,
    "tool_call": _of_calls,
}
