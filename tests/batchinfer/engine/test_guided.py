"""Tests answers under constraints of the real grammar library in one batch with unconstrained rows.

Each complete answer obeys its constraint, and each row has the tokens of a run alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.load.device_fit import CacheRoom, fit
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.scheduler import Scheduler, SchedulerConfig
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.tensors.device_memory import allocate_caches
from batchinfer.models.ops.attention import LayerCache
from tests.batchinfer.engine.guided_rows import KINDS, Row, check, constrained, rows, run, text_of
from tests.batchinfer.engine.interpreted_gpu import NoMeter
from tests.batchinfer.engine.small_engine import (
    Limits,
    Ran,
    checkpoint,
    cpu_ops,
    folder,
    make_runner,
)
from tests.batchinfer.engine.speculating import Drafts, remembered
from tests.batchinfer.engine.teacher_forced import load
from tests.batchinfer.models.foreign.kit import Foreign, make

ALONE = Limits(budget=4096, seqs=1, caching=False)
TOGETHER = Limits(budget=64, seqs=24)
WAYS: dict[str, Limits] = {
    "together": TOGETHER,
    "in small pieces": Limits(budget=7, seqs=5, caching=False),
    "preempted": Limits(budget=64, seqs=24, blocks=40, scarce=True),
}


def cpu_runner(limits: Limits) -> ModelRunner:
    model = checkpoint("llama", num_hidden_layers=1)
    return make_runner(model, cpu_ops(model), limits)


def rehearsed(limits: Limits) -> DeviceRunner:
    """Return a runner as on a GPU: fitted cache, warmed up, with look-ahead."""
    plain, _, _ = constrained(cpu_runner(replace(limits, blocks=1)))
    caches = checkpoint("llama", num_hidden_layers=1).spec.caches

    def allocate(blocks: int) -> list[LayerCache]:
        return allocate_caches(plain.ops, caches, plain.layout, blocks, torch.float32, "cpu")

    room = CacheRoom(lambda _: limits.blocks, allocate, 160, 160 // limits.block_size)
    fitted = fit(plain, SchedulerConfig(limits.seqs, limits.budget), room, NoMeter(), None)
    assert isinstance(fitted.runner, DeviceRunner)
    return fitted.runner


@cache
def alone() -> Ran:
    """Return the reference: each row alone, with an unchunked prompt and an empty cache."""
    return run(cpu_runner(ALONE), ALONE, rows())


def test_rows_alone_follow_their_constraints() -> None:
    """Guards the tests below: each kind has complete answers, and other parameters of the rows take effect."""
    ran, whole = alone(), Counter[str]()
    for row in rows():
        whole[row.kind] += check(row, ran.completions[row.request.key])
    assert all(whole[kind] for kind in KINDS if kind != "free"), whole
    samples = [(row, ran.requests[row.request.key]) for row in rows()]
    assert all(sample.steered for row, sample in samples if row.kind == "regex")
    assert not any(sample.steered or sample.forced_tokens for row, sample in samples if row.kind == "free")
    assert all(
        sample.forced_tokens
        for row, sample in samples
        if row.kind == "schema"
        and not row.request.params.asks_logprobs
        and not row.request.params.forbids_tokens
    )
    assert sum(c.tokens.text_length is not None for c in ran.completions.values()) >= 3, (
        "stop strings end answers"
    )


@pytest.mark.parametrize(
    ("way", "look_ahead"),
    [
        ("preempted", True),
        pytest.param("together", True, marks=pytest.mark.slow),
        *(pytest.param(way, False, marks=pytest.mark.slow) for way in WAYS),
        pytest.param("in small pieces", True, marks=pytest.mark.slow),
    ],
)
def test_answers_in_a_batch_equal_answers_alone(
    way: str, look_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, began = WAYS[way], preempted_answers(monkeypatch)
    ran = run(rehearsed(limits) if look_ahead else cpu_runner(limits), limits, rows())
    assert ran.answers == alone().answers
    assert ran.logprobs.keys() == alone().logprobs.keys()
    check_confidences(ran, alone(), [row.request for row in rows(wishes=("confidence",))])
    assert (sum(step.cached_tokens for step in ran.steps) > 0) == limits.caching
    assert any(step.prefill_tokens and step.decode_tokens for step in ran.steps)
    assert (len(began) > 2) == limits.scarce, "rows are preempted within their constraint"


def check_confidences(ran: Ran, alone: Ran, requests: list[Request]) -> None:
    """Compare the probabilities of tokens among the allowed ones: some are certain, others are not."""
    certain = []
    for key in (request.key for request in requests):
        found, wanted = (one.completions[key].tokens.logprobs for one in (ran, alone))
        assert found is not None
        assert wanted is not None
        np.testing.assert_allclose(found.chosen, wanted.chosen, atol=1e-4)
        certain += (found.chosen > -1e-6).tolist()
    assert {*certain} == {True, False}


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["together", "preempted"])
@pytest.mark.parametrize("look_ahead", [False, True])
def test_drafts_change_no_answer(way: str, look_ahead: bool) -> None:
    """The grammar has another mask after each draft, and a majority of the drafts is right."""
    limits, drafts = WAYS[way], Drafts(remembered(alone(), right=0.9, seed=5))
    ran = run(rehearsed(limits) if look_ahead else cpu_runner(limits), limits, rows(), drafts)
    assert ran.answers == alone().answers
    assert ran.logprobs.keys() == alone().logprobs.keys()
    drafted, right = (sum(column) for column in zip(*drafts.took, strict=True))
    assert 0.3 * drafted < right < drafted
    steered = {key: sample.steered for key, sample in ran.requests.items()}
    assert steered == {key: sample.steered for key, sample in alone().requests.items()}


def preempted_answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the length of each preempted constrained answer."""
    began: list[int] = []
    preempt = Scheduler._preempt

    def noted(self: Scheduler, sequence: Sequence) -> None:
        if sequence.constraint is not None and sequence.output_length > sequence.jump_forward_tokens > 0:
            began.append(sequence.output_length)
        preempt(self, sequence)

    monkeypatch.setattr(Scheduler, "_preempt", noted)
    return began


def asking(number: int, **params: Any) -> Row:
    """Return a separate row with a choice."""
    request = rows()[number].request
    return Row("choice", "own", replace(request, params=SamplingParams(**{"max_tokens": 20, **params})))


@pytest.mark.parametrize("choice", [("yes.",), ("yes.", "no.")], ids=["forced", "sampled"])
def test_a_stop_string_at_the_end_of_a_complete_answer_truncates_it(choice: tuple[str, ...]) -> None:
    """The rest of the text is none of the choices."""
    row, free = asking(0, choice=choice, stop=(".",)), asking(1, stop=("q",))
    found = run(cpu_runner(TOGETHER), TOGETHER, [row, free]).completions
    answer = found[row.request.key]
    assert answer.error is not None
    assert answer.error.code == "incomplete_output"
    assert text_of(answer) in ("yes", "no")
    assert found[free.request.key].error is None


@pytest.mark.parametrize(
    "limits",
    [
        Limits(512, 20, blocks=18, block_size=16, scarce=True),
        pytest.param(Limits(7, 5, caching=False, block_size=16), marks=pytest.mark.slow),
    ],
)
def test_deterministic_answers_have_the_same_bits(limits: Limits) -> None:
    """Includes log-probabilities, bfloat16 and int8 weights."""
    chosen = rows(wishes=("sampled", "penalised", "logprobs"))
    ran = run(deterministic().runner, limits, chosen)
    wanted = run(deterministic().runner, replace(ALONE, block_size=16), chosen)
    assert (ran.answers, ran.logprobs) == (wanted.answers, wanted.logprobs)
    assert (sum(step.preemptions for step in ran.steps) > 0) == limits.scarce
    assert sum(check(row, ran.completions[row.request.key]) for row in chosen) >= 6


@cache
def deterministic() -> LoadedModel:
    return load(folder("llama", num_hidden_layers=1), "bfloat16", "int8")


@cache
def foreign() -> Foreign:
    return make("gpt_bigcode")


def test_a_model_in_transformers_code() -> None:
    chosen = rows(wishes=("greedy", "sampled"))
    ran = run(foreign().runner(TOGETHER), TOGETHER, chosen)
    assert ran.answers == run(foreign().runner(ALONE), ALONE, chosen).answers
    assert sum(check(row, ran.completions[row.request.key]) for row in chosen) >= 6
