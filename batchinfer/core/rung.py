"""A rung of a job's ladder (`on_invalid`): the sampling parameters of a retry after an invalid answer."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.core.sampling import SamplingParams

Rung = dict[str, int | float]  # sampling parameters by name


def with_rung(params: SamplingParams, rung: Rung) -> SamplingParams:
    """Return a copy of a row's sampling parameters for a retry after an invalid answer.

    Args:
        params: The sampling parameters of the row.
        rung: The parameters that the job sets for this retry in its ladder (`on_invalid`), by name.
    """
    return replace(params, **rung)  # type: ignore[arg-type]
