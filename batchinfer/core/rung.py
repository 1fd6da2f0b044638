"""A rung of a job's ladder (`on_invalid`): the sampling parameters of a retry after an invalid answer."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.core.sampling import SamplingParams

Rung = dict[str, int | float]  # sampling parameters by name


def with_rung(params: SamplingParams, rung: Rung) -> SamplingParams:
    """Return a copy of a row's sampling parameters with the values of a rung of the job's ladder (on_invalid)."""
    return replace(params, **rung)  # type: ignore[arg-type]
