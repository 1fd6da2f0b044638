"""Samples as an engine sends them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from batchinfer.core.samples import RequestSample, StepSample

StepMaker = Callable[..., StepSample]
RequestMaker = Callable[..., RequestSample]


def make_step(step: int = 0, **changes: Any) -> StepSample:
    values: dict[str, Any] = {
        "step": step,
        "started_s": float(step),
        "duration_s": 0.75,
        "model_s": 0.5,
        "prefill_tokens": 10,
        "decode_tokens": 4,
        "recomputed_tokens": 2,
        "cached_tokens": 3,
        "sampled_tokens": 5,
        "padded_tokens": 1,
        "running": 5,
        "waiting": 2,
        "preemptions": 0,
        "blocks_used": 6,
        "blocks_total": 8,
        "flops": 1000,
        "bytes": 100,
        "roofline_s": 0.25,
    }
    return StepSample(**{**values, **changes})


def make_request(number: int = 0, **changes: Any) -> RequestSample:
    values: dict[str, Any] = {
        "key": number.to_bytes(32, "big"),
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "cached_tokens": 3,
        "preemptions": 0,
        "queued_s": 1.0,
        "scheduled_s": 2.0,
        "first_token_s": 3.0,
        "finished_s": 7.0,
    }
    return RequestSample(**{**values, **changes})


@pytest.fixture
def step() -> StepMaker:
    return make_step


@pytest.fixture
def request_sample() -> RequestMaker:
    return make_request
