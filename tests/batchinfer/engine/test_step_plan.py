"""A step's plan is all that a runner needs: plans that were recorded give the same tokens and bits in another process,
and plans that were pickled give what those give that were not."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from transformers import AutoModelForCausalLM

from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.micro_batches import MicroBatches
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.plan_writer import PlanWriter
from batchinfer.engine.schedule.scheduler import Chunk, Step
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.schedule.step_plan import SamplingPlan, StepPlan
from batchinfer.input.tokenizer.stop_strings import stop_streams
from tests import warm_commands
from tests.batchinfer.engine.driver import ROOTS, Piped, sequence
from tests.batchinfer.engine.guided_rows import EOS, constrained, rows, tokenizer
from tests.batchinfer.engine.hashing_model import EOS as HASHED_EOS
from tests.batchinfer.engine.hashing_model import hashing_runner
from tests.batchinfer.engine.random_work import Work, works
from tests.batchinfer.engine.recorded_steps import Record, Recorder, recorded
from tests.batchinfer.engine.small_engine import (
    Limits,
    checkpoint,
    cpu_ops,
    drain,
    folder,
    following,
    greedy,
    looking_ahead,
    make_engine,
    make_runner,
    request,
    watcher,
)
from tests.batchinfer.engine.word_constraints import WordConstraints
from tests.examples import examples, first_of

SCARCE = Limits(budget=64, seqs=24, blocks=52, block_size=7, scarce=True)


def run_recorded(ahead: bool) -> Recorder:
    """Rows of every kind, prompts that begin alike, blocks so scarce that rows are preempted."""
    model = checkpoint("llama", num_hidden_layers=1)
    runner: Any = make_runner(model, cpu_ops(model), SCARCE)
    runner, masks, _ = constrained(looking_ahead(runner) if ahead else runner, on_host=not ahead)
    recorder = recorded(runner, masks, Record(SCARCE, ahead, not ahead, torch.get_num_threads()))
    streams = stop_streams(tokenizer().rust)
    engine = make_engine(recorder, SCARCE, frozenset([EOS]), stop_streams=streams, masks=masks)
    ran = drain(engine, [row.request for row in rows()])
    assert ran.total("preemptions") > 0
    assert ran.total("cached_tokens") > 0
    return recorder


def check_variety(plans: list[StepPlan], ahead: bool) -> None:
    """Else the comparison would say little."""
    mixed = [plan for plan in plans if plan.lengths is not None and 1 in plan.lengths.tolist()]
    assert len(mixed) > 3
    assert any(plan.copies is not None for plan in plans)
    assert any(plan.awaited is not None for plan in plans) == ahead
    for name in ("masked", "asking", "penalised", "drawn", "biased", "allowed"):
        assert any(getattr(plan.sampling, name) for plan in plans), name
    assert any(plan.rows is None for plan in plans), "the same rows as before"


@pytest.mark.parametrize("ahead", first_of([True, False], 1))
def test_plans_alone_give_the_same_tokens_and_bits_in_another_process(ahead: bool, tmp_path: Path) -> None:
    recorder = run_recorded(ahead)
    check_variety([pickle.loads(data) for data in recorder.record.plans], ahead)
    record, results = tmp_path / "record", tmp_path / "results"
    record.write_bytes(pickle.dumps(recorder.record))
    model = folder("llama", num_hidden_layers=1)
    asked = [sys.executable, "-m", "tests.batchinfer.engine.recorded_steps", model, record, results]
    warm_commands.run(list(map(str, asked)), check=True, cwd=Path(__file__).parents[3])
    wanted = recorder.given()
    assert any(bits for _, bits, _ in wanted)
    assert pickle.loads(results.read_bytes()) == wanted


@pytest.mark.parametrize("kind", [ModelRunner, DeviceRunner])
@settings(max_examples=examples(5, 100), deadline=None, print_blob=True)
@given(work=works(may_constrain=True))
def test_plans_that_were_pickled_change_no_answer(kind: type[ModelRunner], work: Work) -> None:
    limits, found = work.limits, []
    for wrapped in (lambda same: same, Piped):
        made = hashing_runner(kind, limits.blocks, limits.block_size, work.nan_every, windows=work.windows)
        runner, masks = following(made, WordConstraints(HASHED_EOS))
        engine = make_engine(
            wrapped(runner), limits, frozenset([HASHED_EOS]), stop_streams=watcher, masks=masks
        )
        found.append(drain(engine, work.rows, arrivals=work.arrivals))
    piped, plain = found
    assert piped.answers == plain.answers
    assert piped.logprobs == plain.logprobs


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_plans_of_many_rows_are_small(params: dict[str, Any]) -> None:
    """In the steady state, in which a row ends with nearly every step."""
    rows = []
    for key in range(1025):
        one = request(key, [5] * 513, 900, **params)
        rows.append(Sequence.of(one, ROOTS, None, 0.0))
        rows[-1].tables = [[33 * key + at for at in range(33)]]
    writer = PlanWriter()

    def plan(at: int, chosen: list[Sequence]) -> bytes:
        chunks = [Chunk(row, 512 + at, 1) for row in chosen]
        for row in chosen:
            row.tokens.extend([7] * (513 + at - len(row)))
        return pickle.dumps(writer.of(Step(chunks), chosen))

    plan(0, rows[:1024])
    assert len(plan(1, rows[:1024])) < 15_000
    assert len(plan(2, rows[1:])) < 60_000


def test_any_number_of_rows_of_a_chunk_are_sampled() -> None:
    """One chunk over a prompt and its answer gives the tokens of the answer, and their log-probabilities."""
    model, limits = checkpoint("llama"), Limits()
    runner = make_runner(model, cpu_ops(model), limits)
    prompts = [[3, 1, 4, 1, 5], [2, 7]]
    asked = greedy(prompts, 9, ignore_eos=True, logprobs=3)
    wanted = drain(make_engine(runner, limits, frozenset()), asked)
    chunks, places, begun = [], [], 0
    for number, prompt in enumerate(prompts):
        whole = sequence([*prompt, *wanted.tokens(number)], 5, number)
        whole.tables = [list(range(10 * number, 10 * number + 3))]
        chunks.append(Chunk(whole, 0, len(whole) - 1))
        places += range(begun + len(prompt) - 1, begun + len(whole) - 1)
        begun += len(whole) - 1
    plan = replace(
        PlanWriter().of(Step(chunks), []),
        sampled=np.array(places, np.int32),
        sampled_counts=[9, 9],
        sampling=SamplingPlan(
            argmax=False, asking=list(range(18)), likeliest=[3] * 18, among_allowed=[False] * 18
        ),
    )
    for kind in (ModelRunner, DeviceRunner):
        made = make_runner(model, cpu_ops(model), limits)
        launched = (made if kind is ModelRunner else looking_ahead(made)).launch(plan)
        assert launched.tokens() == [wanted.tokens(number) for number in range(2)]
        for number in range(2):
            theirs = wanted.completions[asked[number].key].tokens.logprobs
            assert theirs is not None
            np.testing.assert_allclose(launched.logprobs()[number].chosen, theirs.chosen, atol=1e-4)
            assert launched.logprobs()[number].top.shape == (9, 3)


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_get_what_they_ask_for_of_any_positions(ahead: bool) -> None:
    """Log-probabilities of tokens that are given, hidden states, or both; and no tokens where none are chosen."""
    model, limits = checkpoint("llama"), Limits()
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    eager = AutoModelForCausalLM.from_pretrained(folder("llama"), dtype=torch.float32)
    with torch.no_grad():
        seen = eager(torch.tensor([text]), output_hidden_states=True)
    logits, states = seen.logits[0].float(), seen.hidden_states[-1][0]
    wanted = logits.log_softmax(-1)[range(9), text[1:]].numpy()
    plain = make_runner(model, cpu_ops(model), limits)
    runner = looking_ahead(plain) if ahead else plain
    whole = sequence(text, 5)
    whole.tables = [[0, 1]]
    plan = PlanWriter().of(Step([Chunk(whole, 0, 10)]), [whole])
    scored = replace(
        plan,
        sampled=np.arange(9, dtype=np.int32),
        sampled_counts=[9],
        sampling=SamplingPlan(
            argmax=False,
            asking=list(range(9)),
            likeliest=[0] * 9,
            among_allowed=[False] * 9,
            given=np.array(text[1:], np.int32),
            states=[4, 8],
            state_chunks=[0, 0],
        ),
    )
    launched = runner.launch(pickle.loads(pickle.dumps(scored)))
    assert launched.tokens() == [text[1:]]
    np.testing.assert_allclose(launched.logprobs()[0].chosen, wanted, atol=1e-4)
    torch.testing.assert_close(torch.from_numpy(launched.states()[0]), states[[4, 8]], atol=1e-4, rtol=0)
    last = replace(plan, sampling=SamplingPlan(states=[0], state_chunks=[0], chooses=False))
    launched = runner.launch(pickle.loads(pickle.dumps(last)))
    assert (launched.tokens(), launched.logprobs()) == ([[]], {})
    torch.testing.assert_close(torch.from_numpy(launched.states()[0]), states[9:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("most", [None, 4])
def test_hidden_states_are_added_up_by_chunk(most: int | None) -> None:
    """Also of chunks that run in several micro-batches, of at most `most` tokens."""
    model, texts = checkpoint("llama"), [[3, 1, 4, 1, 5, 9, 2], [6, 5], [3, 5, 8, 9, 7]]
    plain = make_runner(model, cpu_ops(model), Limits())
    runner = replace(looking_ahead(plain), micro_batches=MicroBatches(most))
    chunks = [Chunk(sequence(text, 5, number), 0, len(text)) for number, text in enumerate(texts)]
    for number, chunk in enumerate(chunks):
        chunk.sequence.tables = [[2 * number, 2 * number + 1]]
    plan = replace(
        PlanWriter().of(Step(chunks), []),
        sampled=np.array([*range(7), *range(9, 14)], np.int32),
        sampled_counts=[7, 5],
        sampling=SamplingPlan(
            states=list(range(12)), state_chunks=[0] * 7 + [1] * 5, summed=True, chooses=False
        ),
    )
    each = runner.launch(replace(plan, sampling=replace(plan.sampling, summed=False))).states()
    assert [states.shape[0] for states in each.values()] == [7, 5]
    for own in (plain, runner):
        sums = own.launch(pickle.loads(pickle.dumps(plan))).states()
        assert sums.keys() == {0, 1}
        for chunk, states in each.items():
            np.testing.assert_allclose(sums[chunk], states.sum(0, keepdims=True), atol=1e-5)
