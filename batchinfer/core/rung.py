"""A rung of a job's ladder (`on_invalid`): the sampling parameters of a retry after an invalid answer."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.core.sampling import SamplingParams

Rung = dict[str, int | float]  # sampling parameters by name


def with_rung(params: SamplingParams, rung: Rung) -> SamplingParams:
    """Return a row's parameters with the rung's values."""
    return replace(params, **rung)  # type: ignore[arg-type]
