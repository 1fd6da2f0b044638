"""Steps launched before the tokens of the one before are known: the same answers, and every block accounted for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchinfer.core.request import Request, TokenLogprobs
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.model_runner import Launched
from batchinfer.engine.runner.runner import StepLaunch
from batchinfer.engine.schedule.sequence import Sequence
from tests.batchinfer.engine.hashing_model import EOS, VOCAB, hashing_runner, with_graphs
from tests.batchinfer.engine.small_engine import (
    Limits,
    Ran,
    checkpoint,
    cpu_ops,
    drain,
    greedy,
    make_engine,
    make_runner,
    watcher,
)
from tests.examples import examples


class OneByOne(DeviceRunner):
    """Waits for every step."""

    @property
    def looks_ahead(self) -> bool:
        return False


class Watched(DeviceRunner):
    """Notes when steps are launched and when their tokens are read."""

    def launch(self, chunks: list[Any], copies: Any = ()) -> Launched:
        EVENTS.append(f"launch {len([e for e in EVENTS if e.startswith('launch')])}")
        return Reading(super().launch(chunks, copies), len([e for e in EVENTS if e.startswith("launch")]) - 1)


EVENTS: list[str] = []


@dataclass
class Reading:
    inner: Launched
    number: int

    @property
    def padded_tokens(self) -> int:
        return self.inner.padded_tokens

    @property
    def launch(self) -> StepLaunch | None:
        return self.inner.launch

    def tokens(self) -> list[list[int]]:
        EVENTS.append(f"read {self.number}")
        return self.inner.tokens()

    def logprobs(self) -> Mapping[Sequence, TokenLogprobs]:
        return self.inner.logprobs()


@dataclass(frozen=True)
class Arriving:
    """A request, and the number of the step before which it comes."""

    request: Request
    step: int


def run(
    kind: Any,
    limits: Limits,
    rows: list[Arriving],
    nan_every: int = 0,
    graphs: bool = False,
    windows: tuple[int | None, ...] = (None,),
) -> Ran:
    runner = hashing_runner(kind, limits.blocks, limits.block_size, nan_every, windows=windows)
    if graphs:
        runner = with_graphs(runner, limits.seqs, 40, limits.blocks)
    engine = make_engine(runner, limits, frozenset([EOS]), stop_streams=watcher)
    waiting = sorted(rows, key=lambda row: row.step)
    ran, number = Ran(), 0
    while waiting or engine.unfinished:
        while waiting and (waiting[0].step <= number or not engine.unfinished):
            engine.add([waiting.pop(0).request])
        output = engine.step()
        engine.check_integrity()
        for completion in output.completions:
            assert completion.key not in ran.completions
            ran.completions[completion.key] = completion
        ran.steps += [output.sample] if output.sample else []
        number += 1
    assert engine.step().sample is None, "a step was left on the device"
    return ran


@st.composite
def requests(draw: Any, number: int, shared: list[int]) -> Request:
    own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9))
    prompt = shared[: draw(st.integers(0, len(shared)))] + own
    most = draw(st.integers(1, 12))
    params = SamplingParams(
        max_tokens=most,
        min_tokens=draw(st.integers(0, most)) if draw(st.booleans()) else 0,
        ignore_eos=draw(st.booleans()),
        stop=("there",) if draw(st.integers(0, 3)) == 0 else (),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=1))),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.4])),
        logprobs=draw(st.sampled_from([None, None, 0, 3])),
    )
    key = np.random.default_rng(number).bytes(32)
    return Request(key, np.array(prompt, np.int32), params)


@st.composite
def work(draw: Any) -> tuple[Limits, list[Arriving], int, tuple[int | None, ...]]:
    shared = draw(st.lists(st.integers(0, VOCAB - 1), min_size=0, max_size=14))
    count = draw(st.integers(1, 9))
    rows = [Arriving(draw(requests(i, shared)), draw(st.integers(0, 12))) for i in range(count)]
    windows = draw(st.sampled_from([(None,), (None,), (5,), (None, 3), (9, None, 1)]))
    limits = Limits(
        budget=draw(st.sampled_from([1, 3, 8, 40])),
        seqs=draw(st.integers(1, 6)),
        caching=draw(st.booleans()),
        blocks=draw(st.integers(9, 24)) * len(windows),
        block_size=4,
        scarce=draw(st.booleans()),
    )
    return limits, rows, draw(st.sampled_from([0, 0, 11])), windows


@settings(max_examples=examples(10, 60), deadline=None)
@given(work())
def test_answers_do_not_depend_on_it(case):
    """Any arrivals, lengths, stops, penalties, broken logits, preemptions and cache groups."""
    limits, rows, nan_every, windows = case
    wanted = run(OneByOne, limits, rows, nan_every, windows=windows)
    got = run(DeviceRunner, limits, rows, nan_every, windows=windows)
    assert got.answers == wanted.answers
    assert got.logprobs == wanted.logprobs
    assert sum(s.sampled_tokens for s in got.steps) == sum(s.sampled_tokens for s in wanted.steps)
    tokens = sum(len(c.token_ids) + (c.error is not None) for c in got.completions.values())
    assert sum(s.sampled_tokens for s in got.steps) == tokens
    replayed = run(DeviceRunner, limits, rows, nan_every, graphs=True, windows=windows)
    assert replayed.answers == wanted.answers
    assert replayed.logprobs == wanted.logprobs


def eager_rows(count: int, most: int, **more: Any) -> list[Arriving]:
    return [
        Arriving(request, 0)
        for request in greedy([[i % VOCAB, 3, i % 5] for i in range(count)], most, **more)
    ]


def test_the_next_step_is_launched_before_the_tokens_of_this_one_are_read():
    EVENTS.clear()
    run(Watched, Limits(), eager_rows(3, 4, ignore_eos=True))
    steps = ["launch 0", "launch 1", "read 0", "launch 2", "read 1", "launch 3", "read 2", "read 3"]
    assert steps == EVENTS, "a known last token is not run behind"


def test_a_row_that_stops_ran_one_token_too_many_which_counts_as_padding():
    rows = eager_rows(8, 30)
    wanted, got = run(OneByOne, Limits(), rows), run(DeviceRunner, Limits(), rows)
    stopped = sum(c.finish_reason == "stop" for c in got.completions.values())
    assert stopped > 2
    assert sum(s.padded_tokens for s in got.steps) == stopped
    assert sum(s.padded_tokens for s in wanted.steps) == 0
    for name in ("prefill_tokens", "decode_tokens", "sampled_tokens", "flops"):
        assert sum(getattr(s, name) for s in got.steps) == sum(getattr(s, name) for s in wanted.steps), name


def test_rows_are_preempted_only_when_no_token_is_awaited():
    """`Scheduler` asserts it; here it is made to come to that."""
    limits = Limits(blocks=12, block_size=4, seqs=6, scarce=True)
    rows = eager_rows(6, 25, ignore_eos=True)
    got = run(DeviceRunner, limits, rows)
    assert sum(s.preemptions for s in got.steps) > 0
    assert got.answers == run(OneByOne, limits, rows).answers


def test_times_of_overlapping_steps_do_not():
    got = run(DeviceRunner, Limits(), eager_rows(4, 10, ignore_eos=True))
    for before, after in zip(got.steps, got.steps[1:], strict=False):
        assert after.started_s >= before.started_s + before.duration_s - 1e-9
    assert all(0 <= s.model_s <= s.duration_s for s in got.steps)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_real_model(family):
    """Its own operators, and the sampler that the CPU uses: greedy, sampled and penalised rows."""
    model, limits = checkpoint(family), Limits(budget=48)
    base = make_runner(model, cpu_ops(model), limits)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 250, n).tolist() for n in (1, 5, 17, 33, 64)]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 20, "min_p": 0.02},
        {"repetition_penalty": 1.3, "min_tokens": 6},
        {"temperature": 1.0, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    ]
    requests = [replace_key(r, i) for i, p in enumerate(prompts) for r in greedy([p], 14, **kinds[i])]
    eos = frozenset(model.spec.eos_token_ids)
    wanted = drain(make_engine(base, limits, eos), requests)
    fields = (base.model, base.ops, base.caches, base.layout, base.sampler, base.cost)
    got = drain(make_engine(DeviceRunner(*fields, base.device), limits, eos), requests)
    assert got.answers == wanted.answers


class Rising:
    """Half of the rows get tokens above their last one, as long as there are any."""

    def masks(self, sequence: Sequence) -> bool:
        return sequence.request.key[0] % 2 == 0

    def fill(self, sequences: list[Sequence], bits: NDArray[np.int32]) -> None:
        for sequence, words in zip(sequences, bits, strict=True):
            assert not sequence.placeholders, "its last token is not known"
            last = sequence.tokens[-1]
            if last < VOCAB - 1:
                words[0] = -1 << (last + 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_rows_wait_for_their_tokens_and_others_do_not(temperature):
    rows = [Arriving(replace_key(row.request, i), i) for i, row in enumerate(eager_rows(8, 9))]
    rows = [replace(r, request=with_temperature(r.request, temperature)) for r in rows]
    limits = Limits()

    def masked(kind: Any) -> Any:
        def made(*fields: Any, **more: Any) -> Any:
            runner = kind(*fields, **more)
            return replace(runner, sampler=replace(runner.sampler, mask=Rising()))

        return made

    wanted, got = run(masked(OneByOne), limits, rows), run(masked(DeviceRunner), limits, rows)
    assert got.answers == wanted.answers
    rising = [a for key, (a, _) in got.answers.items() if key[0] % 2 == 0]
    assert any(len(a) > 1 for a in rising)
    assert all(b > a or a == VOCAB - 1 for ids in rising for a, b in itertools.pairwise(ids))
    free = [a for key, (a, _) in got.answers.items() if key[0] % 2]
    assert any(b <= a < VOCAB - 1 for ids in free for a, b in itertools.pairwise(ids))


def with_temperature(request: Request, temperature: float) -> Request:
    return replace(request, params=replace(request.params, temperature=temperature))


def replace_key(request: Request, number: int) -> Request:
    return replace(request, key=np.random.default_rng(number).bytes(32))
