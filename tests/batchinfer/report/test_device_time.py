"""Device time by kind of work: sums are complete, and a kind of work that is slow on a machine is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.report.tables.device_time import (
    LOSSES,
    StepCounts,
    attention_share,
    device_split,
    kind_seconds,
)
from batchinfer_kernels.cost import OPERATOR_KINDS, Peaks, StepShape, operator_kind, roofline_seconds
from tests.model_costs import llama_cost

PEAKS = Peaks(4e11, 4e10)
COST = llama_cost(30, 576, 1536, 9, 3, 64, 32_000, 2, 2)
INTEGER = llama_cost(30, 576, 1536, 9, 3, 64, 32_000, 2, 1)
shapes = st.builds(
    StepShape, st.integers(0, 4096), st.integers(0, 64), st.integers(0, 10**7), st.integers(0, 10**6),
    st.integers(0, 999),
)  # fmt: skip


def columns(steps: list[StepShape]) -> dict[str, np.ndarray]:
    """Return columns of steps without padding and recomputation."""
    numbers = np.array([(s.tokens, s.sampled, s.pairs, s.kv_tokens, s.copied) for s in steps], float).T
    zeros = np.zeros(len(steps))
    return {
        "prompt_tokens": numbers[0], "decode_tokens": zeros, "recomputed_tokens": zeros, "padded_tokens": zeros,
        "sampled_tokens": numbers[1], "pairs": numbers[2], "kv_tokens": numbers[3], "copied_tokens": numbers[4],
    }  # fmt: skip


@pytest.mark.parametrize(("cost", "peaks"), [(COST, PEAKS), (INTEGER, Peaks(4e11, 4e10, 8e11))])
@given(steps=st.lists(shapes, min_size=1, max_size=5))
def test_many_steps_at_once_cost_what_each_costs(cost, peaks, steps: list[StepShape]) -> None:
    found = kind_seconds(cost, peaks, StepCounts.useful(columns(steps)))
    expected = [roofline_seconds(cost.step(step), peaks) for step in steps]
    assert sum(found.values()).tolist() == pytest.approx(expected)


def mixed_steps() -> list[StepShape]:
    """Return prefill steps, and decode steps with growing contexts."""
    reading = [StepShape(n, 4, 30 * n * n // 8, 30 * n) for n in range(256, 2048, 64)]
    decoding = [StepShape(b, b, 30 * b * c, 30 * b * c) for b in (8, 32, 64) for c in range(64, 1024, 64)]
    return reading + decoding


@pytest.mark.parametrize("slow", OPERATOR_KINDS)
def test_what_is_slow_is_found(slow: str) -> None:
    steps = columns(mixed_steps())
    least = kind_seconds(COST, PEAKS, StepCounts.useful(steps))
    took = {kind: 3.0 if kind == slow else 1.2 for kind in least}
    noise = np.random.default_rng(1).uniform(0.97, 1.03, len(steps["pairs"]))
    steps["model_s"] = noise * sum(took[kind] * seconds for kind, seconds in least.items())
    found = device_split(COST, PEAKS, steps)
    assert sum(found.values()) == pytest.approx(float(steps["model_s"].sum()))
    assert found["roofline"] == pytest.approx(float(sum(least.values()).sum()))
    expected = (took[slow] - 1) * float(least[slow].sum())
    if expected > 0.05 * steps["model_s"].sum():  # smaller times are lost in the noise
        assert found[slow] == pytest.approx(expected, rel=0.25)


def test_steps_of_one_kind_share_their_loss() -> None:
    steps = columns([StepShape(64, 64, 30 * 64 * 500, 30 * 64 * 500)] * 20)
    least = kind_seconds(COST, PEAKS, StepCounts.useful(steps))
    steps["model_s"] = 2 * sum(least.values())
    found = device_split(COST, PEAKS, steps)
    for kind in OPERATOR_KINDS:
        assert found[kind] == pytest.approx(float(least[kind].sum()), rel=0.05)
    assert abs(found["other"]) < 0.05 * float(steps["model_s"].sum())


def test_padding_and_recomputation_have_their_own_time() -> None:
    steps = columns(mixed_steps())
    count = len(steps["pairs"])
    steps |= {"padded_tokens": np.full(count, 64.0), "recomputed_tokens": np.full(count, 32.0)}
    useful = StepCounts.useful(steps)
    ran = kind_seconds(COST, PEAKS, useful.plus(np.full(count, 96.0)))
    steps["model_s"] = 1.5 * sum(ran.values())
    found = device_split(COST, PEAKS, steps)
    assert sum(found.values()) == pytest.approx(float(steps["model_s"].sum()))
    assert found["padding"] == pytest.approx(2 * found["recomputation"], rel=0.2)
    whole = 1.5 * float((sum(ran.values()) - sum(kind_seconds(COST, PEAKS, useful).values())).sum())
    assert found["padding"] + found["recomputation"] == pytest.approx(whole, rel=0.1)
    assert abs(sum(found[part] for part in LOSSES) - found["roofline"] / 2) < 0.05 * steps["model_s"].sum()


def test_attention_has_its_share_without_peaks_too() -> None:
    steps = columns([StepShape(10, 1, 0, 0), StepShape(10, 1, 10**9, 10**6)])
    for peaks in (PEAKS, None):
        none, much = attention_share(COST, peaks, steps).tolist()
        assert 0 <= none < 0.01
        assert 0.9 < much < 1


def test_every_operator_has_a_kind() -> None:
    kinds = {operator.name: operator_kind(operator) for operator in COST.operators}
    assert kinds["attention"] == "attention"
    assert kinds["lm_head"] == kinds["sample"] == "sampling"
    assert (
        kinds["rms_norm"] == kinds["rope_store"] == kinds["activation"] == kinds["embedding"] == "elementwise"
    )
    assert {kinds[name] for name in ("qkv", "o", "gate_up", "down")} == {"linear"}
