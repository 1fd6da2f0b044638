"""Answers under constraints of the real grammar library, in one batch with answers without, combined with all else.

Each whole answer obeys its constraint, and the tokens of every row are those that it gets alone.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import pytest
import torch

from batchinfer.core.request import TokenLogprobs
from batchinfer.core.sampling import SamplingParams
from batchinfer.data.constraints.constrained import GrammarConstraint
from batchinfer.engine.load.build import LoadedModel
from batchinfer.engine.load.device_fit import CacheRoom, fit
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.model_runner import Launched, ModelRunner
from batchinfer.engine.runner.runner import StepLaunch
from batchinfer.engine.schedule.scheduler import Chunk, Scheduler, SchedulerConfig
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.tensors.cache_tensors import allocate_caches
from batchinfer.models.ops.interface import LayerCache
from batchinfer_kernels.arithmetic import Quantization
from tests.batchinfer.engine.guided_rows import KINDS, Row, check, constrained, rows, run, text_of
from tests.batchinfer.engine.small_engine import Limits, Ran, checkpoint, cpu_ops, folder, make_runner
from tests.batchinfer.engine.teacher_forced import load
from tests.batchinfer.models.foreign.kit import Foreign, make

ALONE = Limits(budget=4096, seqs=1, caching=False)
TOGETHER = Limits(budget=64, seqs=24)
WAYS: dict[str, Limits] = {
    "together": TOGETHER,
    "in small pieces": Limits(budget=7, seqs=5, caching=False),
    "preempted": Limits(budget=64, seqs=24, blocks=45, scarce=True),
}


def cpu_runner(limits: Limits, quantization: Quantization = "none") -> ModelRunner:
    model = checkpoint("llama", num_hidden_layers=1)
    return make_runner(model, cpu_ops(model, quantization), limits)


class NoMeter:
    """A CPU's memory is not measured."""

    def free(self) -> int:
        return 1 << 30

    def restart(self) -> None:
        """Nothing is counted."""

    def peak(self) -> int:
        return 0


def rehearsed(limits: Limits) -> DeviceRunner:
    """As an engine on a GPU has it: its cache fitted, its steps rehearsed, looking ahead."""
    plain, _ = constrained(cpu_runner(replace(limits, blocks=1)))
    caches = checkpoint("llama", num_hidden_layers=1).spec.caches

    def allocate(blocks: int) -> list[LayerCache]:
        return allocate_caches(plain.ops, caches, plain.layout, blocks, torch.float32, "cpu")

    room = CacheRoom(lambda _: limits.blocks, allocate, 160, 160 // limits.block_size)
    fitted = fit(plain, SchedulerConfig(limits.seqs, limits.budget), room, NoMeter(), None)
    assert isinstance(fitted.runner, DeviceRunner)
    return fitted.runner


@cache
def alone() -> Ran:
    """Each row with nobody beside it, its prompt in one piece and nothing in the cache."""
    return run(cpu_runner(ALONE), ALONE, rows())


def test_rows_alone_obey_their_constraints_and_are_no_easy_ones() -> None:
    """Of each kind some are whole, and what rows ask for beside shows: else the tests below would compare little."""
    ran, whole = alone(), Counter[str]()
    for row in rows():
        whole[row.kind] += check(row, ran.completions[row.request.key])
    assert all(whole[kind] for kind in KINDS if kind != "free"), whole
    samples = [(row, ran.requests[row.request.key]) for row in rows()]
    assert all(sample.steered for row, sample in samples if row.kind == "regex")
    assert not any(sample.steered or sample.forced_tokens for row, sample in samples if row.kind == "free")
    assert all(
        sample.forced_tokens for row, sample in samples if row.kind == "schema" and row.wish != "logprobs"
    )
    assert sum(c.text_length is not None for c in ran.completions.values()) >= 3, "stop strings end answers"


@pytest.mark.parametrize(
    ("way", "look_ahead"),
    [
        ("together", True),
        ("preempted", True),
        *(pytest.param(way, False, marks=pytest.mark.slow) for way in WAYS),
        pytest.param("in small pieces", True, marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_of_rows_alone(way: str, look_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    limits, began = WAYS[way], preempted_answers(monkeypatch)
    ran = run(rehearsed(limits) if look_ahead else cpu_runner(limits), limits, rows())
    assert ran.answers == alone().answers
    assert ran.logprobs.keys() == alone().logprobs.keys()
    assert (sum(step.cached_tokens for step in ran.steps) > 0) == limits.caching
    assert any(step.prefill_tokens and step.decode_tokens for step in ran.steps)
    assert (len(began) > 2) == limits.scarce, "rows are preempted in the middle of what they have to obey"


def test_greedy_rows_whose_argmax_is_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all rows are greedy, tokens are asked for one by one, and masks are filled for what is refused."""
    asked: list[bool] = []
    allows = GrammarConstraint.allows

    def noted(self: GrammarConstraint, token: int) -> bool:
        asked.append(allows(self, token))
        return asked[-1]

    monkeypatch.setattr(GrammarConstraint, "allows", noted)
    loose = [asking(n, regex="[ -~\n]{15}", max_tokens=30) for n in range(6, 12)]
    chosen = [*rows(wishes=("cut",)), *loose]
    wanted = run(cpu_runner(ALONE), ALONE, chosen)
    assert not asked
    ran = run(cpu_runner(TOGETHER), TOGETHER, chosen)
    assert ran.answers == wanted.answers
    assert {*asked} == {True, False}
    assert all(ran.requests[key].steered == wanted.requests[key].steered for key in wanted.requests)


def preempted_answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How far constrained answers had come, each time that one was preempted."""
    began: list[int] = []
    preempt = Scheduler._preempt

    def noted(self: Scheduler, sequence: Sequence) -> None:
        if sequence.constraint is not None and sequence.output_length > sequence.jump_forward_tokens > 0:
            began.append(sequence.output_length)
        preempt(self, sequence)

    monkeypatch.setattr(Scheduler, "_preempt", noted)
    return began


def asking(number: int, **params: Any) -> Row:
    """A row of its own, under a choice."""
    request = rows()[number].request
    return Row("choice", "own", replace(request, params=SamplingParams(**{"max_tokens": 20, **params})))


def test_min_tokens_leave_the_end_to_the_constraint() -> None:
    chosen = [asking(n, choice=("a", "ab"), min_tokens=9, temperature=50.0) for n in range(12)]
    ran = run(cpu_runner(TOGETHER), TOGETHER, chosen)
    assert {text_of(completion) for completion in ran.completions.values()} == {"a", "ab"}
    assert all(completion.error is None for completion in ran.completions.values())


@pytest.mark.parametrize("choice", [("yes.",), ("yes.", "no.")], ids=["forced", "sampled"])
def test_a_stop_string_that_is_a_whole_answers_end_cuts_it(choice: tuple[str, ...]) -> None:
    """What is left of the text is none of the choices."""
    row, free = asking(0, choice=choice, stop=(".",)), asking(1, stop=("q",))
    found = run(cpu_runner(TOGETHER), TOGETHER, [row, free]).completions
    answer = found[row.request.key]
    assert answer.error is not None
    assert answer.error.code == "incomplete_output"
    assert text_of(answer) in ("yes", "no")
    assert found[free.request.key].error is None


@pytest.mark.parametrize("way", [pytest.param("together", marks=pytest.mark.slow), "preempted"])
def test_int8_weights(way: str) -> None:
    """By the compiled operators, whose numbers do not depend on who shares a batch."""
    chosen = rows(wishes=("greedy", "sampled", "penalised"))
    ran = run(cpu_runner(WAYS[way], "int8"), WAYS[way], chosen)
    assert ran.answers == run(cpu_runner(ALONE, "int8"), ALONE, chosen).answers
    assert ran.answers != {row.request.key: alone().answers[row.request.key] for row in chosen}
    assert sum(check(row, ran.completions[row.request.key]) for row in chosen) >= 8


@pytest.mark.parametrize(
    "cut",
    [
        Limits(512, 20, blocks=18, block_size=16, scarce=True),
        pytest.param(Limits(7, 5, caching=False, block_size=16), marks=pytest.mark.slow),
    ],
)
def test_deterministic_answers_have_the_same_bits(cut: Limits) -> None:
    """Log-probabilities too, of bfloat16 and of weights in int8."""
    chosen = rows(wishes=("sampled", "penalised", "logprobs"))
    ran = run(deterministic().runner, cut, chosen)
    wanted = run(deterministic().runner, replace(ALONE, block_size=16), chosen)
    assert (ran.answers, ran.logprobs) == (wanted.answers, wanted.logprobs)
    assert (sum(step.preemptions for step in ran.steps) > 0) == cut.scarce
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


@dataclass(frozen=True)
class Noted:
    """A step: the keys of the sequences that it samples for, and whether the tokens of the one before were unread."""

    keys: frozenset[bytes]
    ahead: bool


@dataclass(frozen=True)
class Reading:
    """Counts the steps whose tokens are read."""

    inner: Launched
    read: list[int]

    @property
    def padded_tokens(self) -> int:
        return self.inner.padded_tokens

    @property
    def launch(self) -> StepLaunch | None:
        return self.inner.launch

    def tokens(self) -> list[list[int]]:
        self.read[0] += 1
        return self.inner.tokens()

    def logprobs(self) -> Mapping[Sequence, TokenLogprobs]:
        return self.inner.logprobs()


def noting(steps: list[Noted]) -> type[DeviceRunner]:
    """A runner that notes each step."""
    read = [0]

    class Noting(DeviceRunner):
        def launch(self, chunks: list[Chunk], copies: Any = ()) -> Launched:
            keys = frozenset(chunk.sequence.request.key for chunk in chunks if chunk.samples)
            steps.append(Noted(keys, read[0] < len(steps)))
            return Reading(DeviceRunner.launch(self, chunks, copies), read)

    return Noting


def test_rows_under_constraints_wait_for_their_tokens_and_others_do_not() -> None:
    """A row without one samples in each step after its first; one with may do so in every second."""
    steps: list[Noted] = []
    chosen = rows(("schema", "regex", "free"), ("greedy", "sampled", "penalised"))
    plain = rehearsed(TOGETHER)
    runner = noting(steps)(**{field.name: getattr(plain, field.name) for field in fields(plain)})
    ran = run(runner, TOGETHER, chosen)
    assert sum(step.ahead for step in steps) > len(steps) - 5
    for row in chosen:
        places = [at for at, step in enumerate(steps) if row.request.key in step.keys]
        if row.kind == "free":
            extra = (
                ran.completions[row.request.key].finish_reason == "stop"
            )  # a step that looked ahead of its end
            assert len(places) == len(ran.completions[row.request.key].token_ids) + extra > 20
            assert places == list(range(places[0], places[0] + len(places)))
        else:
            assert len(places) > 5
            assert not any(steps[b].ahead for a, b in itertools.pairwise(places) if b == a + 1)
