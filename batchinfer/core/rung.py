"""A rung of a job's ladder (`on_invalid`): the parameters with which a row runs again whose answer was not valid."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.core.sampling import SamplingParams

Rung = dict[str, int | float]  # names of sampling parameters, and their values


def with_rung(params: SamplingParams, rung: Rung) -> SamplingParams:
    """Return a row's parameters with those of a rung laid over them."""
    return replace(params, **rung)  # type: ignore[arg-type]
