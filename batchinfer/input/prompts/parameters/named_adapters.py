"""The adapter of a row, by the name that the row has for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.rows import RowProblem, Values, kind_of

_NAMED = 10  # adapters that a message lists


class NamedAdapters:
    """`fingerprints`: of the job's adapters, by name; `column`: of the name of a row's adapter."""

    def __init__(self, fingerprints: Mapping[str, str], column: str | None) -> None:
        self._fingerprints, self._column = fingerprints, column

    def of_row(self, params: SamplingParams, values: Values) -> SamplingParams:
        """Return the parameters with the adapter that the row names, if it names one. Raises RowProblem for a name that
        the job does not have."""
        name = None if self._column is None else values.get(self._column)
        if name is None or name == "":
            return params
        if not isinstance(name, str):
            raise RowProblem(
                "bad_adapter", f"column {self._column!r} must name an adapter, not be {kind_of(name)}"
            )
        if name not in self._fingerprints:
            have = ", ".join([*self._fingerprints][:_NAMED])
            text = f"column {self._column!r} names the adapter {name[:100]!r}; model.adapters has {have}"
            raise RowProblem("bad_adapter", text)
        return replace(params, adapter=self._fingerprints[name])

    def of_request(self, params: SamplingParams, body: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters with the adapter that the field `model` of a request names. Any other name is the
        model's, whatever it is called elsewhere."""
        name = body.get("model") if self._fingerprints else None
        if not isinstance(name, str) or name not in self._fingerprints:
            return params
        return replace(params, adapter=self._fingerprints[name])
