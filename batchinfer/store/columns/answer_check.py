"""Checks of JSON answers as they arrive, so that errors count while the job runs: no name twice, a fit for columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from batchinfer.core.reasoning import ReasoningTokens, cut
from batchinfer.core.request import Completion, RowError
from batchinfer.store.columns.column_kinds import Unfit
from batchinfer.store.columns.logprob_column import Detokenizer
from batchinfer.store.columns.schema_columns import SchemaColumns

# Raised when other answers fit their columns: stored ones were checked by the rules before.
CHECK_VERSION = 1


def parsed_answer(text: str, objects: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The JSON value of an answer, its numbers with all their digits; `objects` makes one of names and values.

    Raises ValueError, RecursionError.
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


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object that is read alike by everyone. Which of two equal names counts differs between readers, and a schema
    cannot keep a grammar from writing an unnamed property twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(place for place, (name, _) in enumerate(pairs) if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise Unfit(
            f"property {twice + 1} of an object in the answer has the name of an earlier one; each name may occur once"
        )
    return found


def _answer(completion: Completion, marks: ReasoningTokens | None) -> Sequence[int]:
    """Return the tokens behind the reasoning."""
    ids: list[int] = completion.tokens.token_ids.tolist()
    return ids if marks is None else ids[cut(ids, marks).answer or 0 :]


def _check_calls(text: str) -> None:
    """Check the arguments of calls, the JSON objects in an answer. Raises Unfit for a name that occurs twice."""
    decoder = json.JSONDecoder(parse_float=str, parse_int=str, object_pairs_hook=_named_once)
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
    """Turns answers that are no JSON of the one meaning, or that their columns cannot hold, into errors.

    `columns`: None where answers have none.
    """

    columns: SchemaColumns | None
    detokenizer: Detokenizer

    def checked(
        self,
        completions: Sequence[Completion],
        marks: Mapping[bytes, ReasoningTokens] | None = None,
        calling: Collection[bytes] = (),
    ) -> list[Completion]:
        """Return the completions. A completion that does not fit has an error.

        Args:
            completions: Answers that are JSON, or that call tools.
            marks: By key, the tokens around the reasoning that comes first.
            calling: The keys of answers that call tools.
        """
        ids = [_answer(c, (marks or {}).get(c.key)) for c in completions]
        return [
            self._checked(c, text, _check_calls if c.key in calling else self._check)
            for c, text in zip(completions, self.detokenizer.decode_batch(ids), strict=True)
        ]

    def _check(self, text: str) -> None:
        answer = parsed_answer(text, _named_once)
        if self.columns is not None:
            self.columns.check(answer)

    def _checked(self, completion: Completion, text: str, check: Callable[[str], None]) -> Completion:
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
