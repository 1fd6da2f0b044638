"""Lengths of answers, estimated from samples with many truncated answers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.statistics.survival import SurvivalCurve

ANSWERS = 20_000


@pytest.mark.parametrize("kind", ["geometric", "normal", "two peaks"])
def test_truncated_answers_do_not_make_answers_look_short(kind: str) -> None:
    """The bounds of some rows do not depend on their lengths. The estimate finds the lengths of unbounded rows.
    Counting a truncated answer as complete would give a third less.
    """
    rng = np.random.default_rng(5)
    lengths = {
        "geometric": rng.geometric(1 / 60, ANSWERS),
        "normal": np.maximum(1, rng.normal(80, 20, ANSWERS).astype(int)),
        "two peaks": np.where(
            rng.random(ANSWERS) < 0.5, rng.integers(5, 20, ANSWERS), rng.integers(90, 120, ANSWERS)
        ),
    }[kind]
    most = rng.choice([8, 32, 64, 256], ANSWERS)
    seen = np.minimum(lengths, most)
    found = SurvivalCurve.of(seen, lengths > most)
    shares = (np.arange(2000) + 0.5) / 2000
    for bound in (16, 100, 256):
        truth = np.minimum(lengths, bound).mean()
        assert found.mean(bound) == pytest.approx(truth, rel=0.02)
        assert np.mean([found.length(share, bound) for share in shares]) == pytest.approx(truth, rel=0.02)
    assert seen.mean() < 0.75 * np.minimum(lengths, 256).mean(), "truncation biases the plain mean"


def test_beyond_what_was_seen_answers_go_on_ending() -> None:
    """Nine of ten answers end by 50 tokens, the others were truncated at 64. The estimate stays far below 256."""
    found = SurvivalCurve.of(np.append(np.arange(1, 51).repeat(9), np.full(50, 64)), np.arange(500) >= 450)
    assert found.length(0.95, 64) == 64
    assert 64 < found.length(0.95, 256) < 128
    assert found.length(0.999, 100) == 100
    mean = np.mean([found.length((n + 0.5) / 999, 256) for n in range(999)])
    assert found.mean(256) == pytest.approx(mean, rel=0.01)


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=60), st.integers(1, 80))
def test_lengths_rise_with_the_share_and_stay_within_bounds(seen: list[tuple[int, bool]], most: int) -> None:
    lengths, truncated = np.array([one[0] for one in seen]), np.array([one[1] for one in seen])
    found = SurvivalCurve.of(lengths, truncated)
    assert (found is None) == truncated.all()
    if found is None:
        return
    drawn = [found.length(share, most) for share in np.linspace(0, 1, 23)]
    assert drawn == sorted(drawn)
    assert all(1 <= length <= most for length in drawn)
    assert 0 < found.mean(most) <= most
    if not truncated.any():
        assert found.mean(40) == pytest.approx(lengths.mean())
