"""The error budget of a job."""

from __future__ import annotations

import pytest

from batchinfer.store.results.error_budget import Budget


@pytest.mark.parametrize(
    ("rate", "rows", "allowed"), [(0.29, 100, 29), (0.57, 100, 57), (0.01, 99, 0), (1e-5, 10**5, 1)]
)
def test_a_budget_is_exact_for_decimal_rates(rate, rows, allowed):
    """In floats 0.29 × 100 is less than 29."""
    assert Budget(rows, rate, publish=False).allowed == allowed
