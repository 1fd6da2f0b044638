"""The adapter that a row names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.rows import RowProblem, Values, kind_of

_NAMED = 10  # maximum number of adapters in a message


class NamedAdapters:
    """Finds the LoRA adapter that a row names.

    Args:
        fingerprints: The fingerprints of the job's adapters by name.
        column: The column that names a row's adapter, or None.
    """

    def __init__(self, fingerprints: Mapping[str, str], column: str | None) -> None:
        self._fingerprints, self._column = fingerprints, column

    def of_row(self, params: SamplingParams, values: Values) -> SamplingParams:
        """Return the parameters with the fingerprint of the adapter that the row names, or unchanged if it names none.

        Args:
            params: The sampling parameters of the row.
            values: The values of the row by column.

        Raises:
            RowProblem: The job has no adapter of this name.
        """
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
        """Return the parameters with the fingerprint of the adapter that the field `model` of an OpenAI request names.

        A name that is no adapter of the job is accepted: it means the model without an adapter.

        Args:
            params: The sampling parameters of the request.
            body: The body of the request.
        """
        name = body.get("model") if self._fingerprints else None
        if not isinstance(name, str) or name not in self._fingerprints:
            return params
        return replace(params, adapter=self._fingerprints[name])
