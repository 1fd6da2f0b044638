"""The ladder of a job file (`on_invalid`): parameters for further attempts at rows with invalid answers."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from batchinfer.core.rung import Rung, with_rung
from batchinfer.core.sampling import BOUNDS, SamplingParams
from batchinfer.job.wording import ValidValues, describe_value
from batchinfer.job.yaml_tree import Finding

MOST_RUNGS = 8
# Parameters for choosing tokens and for lengths. The required form of an answer is the same in all attempts.
LADDER_PARAMETERS = tuple(name for name in BOUNDS if name not in ("logprobs", "prompt_logprobs"))
_FLOATS = frozenset(one.name for one in fields(SamplingParams) if isinstance(one.default, float))


def _rungs(value: object) -> object:
    # Values other than lists are returned unchanged, and pydantic rejects them
    if not isinstance(value, tuple | list):
        return value
    if len(value) > MOST_RUNGS:
        raise ValueError(f"has {len(value)} items; {MOST_RUNGS} are the most")
    return tuple(_rung(at, one) for at, one in enumerate(value, 1))


def _rung(at: int, value: object) -> Rung:
    if not isinstance(value, dict) or not value:
        what = "an empty mapping" if value == {} else describe_value(value)
        raise ValueError(f"found {what} as item {at}; it must be parameters, such as {{temperature: 0.7}}")
    return {str(name): _number(at, name, given) for name, given in value.items()}


def _number(at: int, name: object, value: object) -> int | float:
    if name not in LADDER_PARAMETERS:
        near = difflib.get_close_matches(str(name), LADDER_PARAMETERS, 1)
        better = f"did you mean {near[0]}?" if near else f"there are {', '.join(LADDER_PARAMETERS)}"
        raise ValueError(
            f"{describe_value(name)} in item {at} is not a parameter with which rows can run again; {better}"
        )
    bounds, number = BOUNDS[str(name)], value
    kinds = (int, float) if name in _FLOATS else (int,)
    right = isinstance(number, kinds) and not isinstance(number, bool)
    if not right or not bounds.low <= number <= bounds.high or (bounds.above and number == bounds.low):  # type: ignore[operator]
        kind = "a number" if name in _FLOATS else "a whole number"
        least = "above" if bounds.above else "from"
        raise ValueError(
            f"found {describe_value(value)} for {name} in item {at}; "
            f"it must be {kind} {least} {bounds.low:,} to {bounds.high:,}"
        )
    return float(number) if name in _FLOATS else number  # type: ignore[arg-type,return-value]


_SHOWN: dict[str, Any] = {"properties": {name: {"type": "number"} for name in LADDER_PARAMETERS}}
_SHOWN |= {"additionalProperties": False, "minProperties": 1}
_Written = Annotated[dict[str, float], Field(json_schema_extra=_SHOWN)]
Ladder = Annotated[
    tuple[Rung, ...],
    BeforeValidator(_rungs, json_schema_input_type=tuple[_Written, ...]),
    ValidValues("a list of sampling parameters, as in [{temperature: 0.7, seed: 1}, {max_tokens: 4096}]"),
]


def ladder_findings(ladder: Sequence[Rung], params: SamplingParams, alike: bool) -> Iterator[Finding]:
    """Find mistakes in `on_invalid`, the changed sampling parameters of the further attempts at a row.

    An attempt must differ from all earlier ones, and its parameters must not contradict each other.

    Args:
        ladder: The changed parameters of each further attempt.
        params: The parameters of the first attempt.
        alike: True if all rows have the same parameters.
    """
    if ladder and alike and params.has_known_length:
        message = (
            "has no effect with sampling.ignore_eos: only max_tokens ends an answer, so all answers are cut"
        )
        yield Finding(("on_invalid",), message, "remove one of the two")
    tried = {params.canonical().to_json(): 1}
    for number, rung in enumerate(ladder, 1):
        changed = with_rung(params, rung)
        if changed.min_tokens > changed.max_tokens:
            message = f"has min_tokens {changed.min_tokens} in item {number}, more than max_tokens, which is "
            yield Finding(("on_invalid",), f"{message}{changed.max_tokens}")
        before = tried.setdefault(changed.canonical().to_json(), number + 1)
        if before <= number and alike:
            message = (
                f"asks in item {number} for what attempt {before} asks for, which would give the same answers"
            )
            hint = (
                "change another parameter; with temperature 0 a seed, top_p, top_k and min_p change nothing"
            )
            yield Finding(("on_invalid",), message, hint)
