"""Checks JSON answers as they arrive, so errors count during the run.

Names of an object must be unique, and values must fit their columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from batchinfer.core.reasoning import ReasoningTokens, locate_reasoning
from batchinfer.core.request import Completion, RowError
from batchinfer.store.columns.column_kinds import Unfit
from batchinfer.store.columns.logprob_column import Detokenizer
from batchinfer.store.columns.schema_columns import SchemaColumns

# Increase it if other answers fit their columns: stored answers passed the earlier checks
CHECK_VERSION = 1


def parse_answer(text: str, objects: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the JSON value of an answer. Numbers keep all their digits.

    Args:
        text: The JSON text.
        objects: Converts the list of names and values of each object, like `object_pairs_hook` of
            `json.loads`. None: objects become dicts.

    Raises:
        ValueError: The text is not valid JSON.
        RecursionError: It is nested too deeply.
    """
    return json.loads(text, parse_float=_decimal, parse_int=_integer, object_pairs_hook=objects)


def _decimal(digits: str) -> Decimal:
    try:
        return Decimal(digits)
    except InvalidOperation:
        raise Unfit("the answer holds a number whose exponent has more than 18 digits") from None


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise Unfit(f"the answer holds a whole number of {len(digits)} digits") from None


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # JSON readers differ in which of two values with the same name they use. A grammar cannot prevent
    # repeated names if a schema allows further properties
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(place for place, (name, _) in enumerate(pairs) if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise Unfit(
            f"property {twice + 1} of an object in the answer has the name of an earlier one; each name may occur once"
        )
    return found


def _answer(completion: Completion, marks: ReasoningTokens | None) -> Sequence[int]:
    ids: list[int] = completion.tokens.token_ids.tolist()
    return ids if marks is None else ids[locate_reasoning(ids, marks).answer or 0 :]


def _check_calls(text: str) -> None:
    decoder = json.JSONDecoder(parse_float=str, parse_int=str, object_pairs_hook=_unique_names)
    at = text.find("{")
    while at >= 0:
        try:
            _, end = decoder.raw_decode(text, at)
        except Unfit:
            raise
        except ValueError:  # a brace outside of JSON
            end = at + 1
        at = text.find("{", end)


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """Turns JSON answers into errors if they are invalid or do not fit their result columns.

    Attributes:
        columns: The result columns for the fields of JSON answers. None: answers have no such columns.
        detokenizer: Converts tokens to text.
    """

    columns: SchemaColumns | None
    detokenizer: Detokenizer

    def check_all(
        self,
        completions: Sequence[Completion],
        marks: Mapping[bytes, ReasoningTokens] | None = None,
        calling: Collection[bytes] = (),
    ) -> list[Completion]:
        """Return the completions. Those with an invalid JSON answer are replaced by errors.

        Args:
            completions: Answers that are JSON or that call tools.
            marks: The tokens that begin and end the reasoning before the answer, by work key.
            calling: The work keys of answers that call tools. They are not checked against the result
                columns.
        """
        ids = [_answer(c, (marks or {}).get(c.key)) for c in completions]
        return [
            self._check_one(c, text, _check_calls if c.key in calling else self._check)
            for c, text in zip(completions, self.detokenizer.decode_batch(ids), strict=True)
        ]

    def _check(self, text: str) -> None:
        answer = parse_answer(text, _unique_names)
        if self.columns is not None:
            self.columns.check(answer)

    def _check_one(self, completion: Completion, text: str, check: Callable[[str], None]) -> Completion:
        if completion.error is not None:
            return completion
        try:
            check(text[: completion.tokens.text_length])
        except Unfit as error:
            problem = str(error)
        except (ValueError, RecursionError):
            problem = "the answer is not valid JSON"
        else:
            return completion
        failed = RowError("unfit_output", "policy", problem[:1000])
        return replace(completion, finish_reason="error", error=failed)
