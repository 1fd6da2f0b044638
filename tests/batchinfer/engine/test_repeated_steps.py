"""Tests that decode steps launched at once give the answers and counts of single steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchinfer.core.request import Request
from batchinfer.engine.drafts.drafter import CostedDrafter
from batchinfer.engine.drafts.other_answers import OtherAnswers
from batchinfer.engine.drafts.step_times import DraftedStepTimes
from batchinfer.engine.graphs.decode_graphs import DecodeGraphs
from batchinfer.engine.graphs.repeated_replays import RepeatedReplays
from batchinfer.engine.load import loaded_model
from batchinfer.engine.loop.multi_step import MultiStepDecoding
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.sampled import SamplingResult
from batchinfer.engine.runner.sampler import Sampler
from batchinfer.engine.schedule.batched_admission import AdmissionCosts
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.schedule.step_plan import StepPlan
from batchinfer_kernels.cost import Peaks
from tests.batchinfer.engine import steps_at_once
from tests.batchinfer.engine.driver import PreemptingAhead
from tests.batchinfer.engine.hashing_model import EOS, SHAPE, HashingOps, hashing_runner, with_graphs
from tests.batchinfer.engine.random_work import EASY, Work, works
from tests.batchinfer.engine.small_engine import (
    TRITON,
    AlwaysRepeated,
    Limits,
    Ran,
    at_once,
    drain,
    greedy,
    make_engine,
    request,
    watcher,
)
from tests.batchinfer.engine.speculating import Drafts, remembered
from tests.examples import examples


@dataclass
class Launches:
    """Wraps a runner and records the number of steps per plan and of computed positions."""

    runner: Any
    steps: list[int] = field(default_factory=list)
    computed: int = 0

    def __post_init__(self) -> None:
        forward = self.runner.model.forward

        def counting(token_ids: Tensor, *rest: Any) -> Tensor:
            self.computed += len(token_ids)
            hidden: Tensor = forward(token_ids, *rest)
            return hidden

        self.runner.model.forward = counting

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def launch(self, plan: StepPlan) -> Any:
        self.steps.append(plan.steps)
        return self.runner.launch(plan)


class Sometimes(Drafts):
    """Proposes another run's answer at about every seventh position, for which the row waits."""

    def __init__(self, wanted: Ran) -> None:
        told, rng = remembered(wanted, 0.7, 1), random.Random(2)
        super().__init__(lambda row: told(row) if rng.random() < 0.5 else [])

    def should_hold_row(self, sequence: Sequence) -> bool:
        return (len(sequence) * 5 + sequence.prompt_length) % 7 == 0


def ran(
    work: Work, limits: Limits, steps: int, graphs: bool = False, kind: Any = None, drafter: Any = None
) -> tuple[Ran, Launches]:
    runner = hashing_runner(
        DeviceRunner, limits.blocks, limits.block_size, work.nan_every, windows=work.windows
    )
    noted = Launches(with_graphs(runner, limits.seqs, 40, limits.blocks) if graphs else runner)
    more = {"stop_streams": watcher, "repeated": at_once(steps), "drafter": drafter}
    engine = make_engine(noted, limits, frozenset([EOS]), kind=kind, **more)
    return drain(engine, work.rows, arrivals=work.arrivals), noted


def plain(row: Request) -> Request:
    """Return the row without parameters that depend on earlier tokens."""
    kept = replace(row.params, min_tokens=0, repetition_penalty=1.0, frequency_penalty=0.0, bad_tokens=())
    return replace(row, params=replace(kept, logprobs=None))


@settings(max_examples=examples(8, 400), deadline=None, print_blob=True)
@given(works(), st.integers(2, 5), st.booleans(), st.booleans())
def test_answers_and_work_equal_single_steps(work: Work, steps: int, graphs: bool, preempts: bool) -> None:
    """Greedy and sampled rows end within a launch by a token, a stop string, their length, a loop or NaN.
    Other rows arrive, share prefixes, are preempted, leave windows, or find no block."""
    work = replace(work, rows=[*map(plain, work.rows)])
    wanted, _ = ran(work, EASY, 1)
    single, _ = ran(work, work.limits, 1, graphs)
    kind = PreemptingAhead if preempts else None
    got, launches = ran(work, work.limits, steps, graphs, kind)
    assert got.answers == single.answers == wanted.answers
    assert max(launches.steps) <= steps
    event(f"steps at once: {max(launches.steps) > 1}, preempted: {got.total('preemptions') > 0}")
    same = ("prefill_tokens", "cached_tokens", "preemptions", "copied_tokens")
    if all(got.total(name) == single.total(name) for name in same) and not got.total("preemptions"):
        for name in ("sampled_tokens", "decode_tokens", "flops", "pairs"):
            assert got.total(name) == single.total(name), name
    assert got.total("sampled_tokens") == sum(map(_given, got.completions.values()))
    assert [sample.step for sample in got.steps] == list(range(len(got.steps)))
    for before, after in pairwise(got.steps):
        assert after.started_s >= before.started_s + before.duration_s - 1e-9
    if not graphs:  # a capture runs a step twice
        useful = got.total("prefill_tokens") + got.total("decode_tokens")
        assert useful + got.total("padded_tokens") == launches.computed


def test_only_rows_without_drafts_run_several_steps() -> None:
    work = rows_of(4, 40, ignore_eos=True)
    wanted, _ = ran(work, EASY, 1)
    drafter = Sometimes(wanted)
    got, launches = ran(work, EASY, 4, drafter=drafter)
    assert got.answers == wanted.answers
    assert {1, 4} <= {*launches.steps}
    assert sum(right for _, right in drafter.took) > 3
    useful = got.total("prefill_tokens") + got.total("decode_tokens")
    assert useful + got.total("padded_tokens") == launches.computed


def test_rows_that_look_for_drafts_do_so_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no draft is ever found, few launches are single steps."""
    monkeypatch.setattr(AlwaysRepeated, "can_hold_rows", MultiStepDecoding.can_hold_rows)
    limits, rng = replace(EASY, seqs=24, budget=200, blocks=24 * 40), random.Random(1)
    rows = [request(i, [i % 7, 3, i % 5], rng.randrange(60, 160), ignore_eos=True) for i in range(32)]
    work, ticks = Work(limits, rows, [0] * 32, (None,), 0, 0), iter(range(1 << 40))
    times = DraftedStepTimes(SHAPE, Peaks(1e12, 1e9))
    drafter = CostedDrafter([OtherAnswers()], times, 400, True, lambda: next(ticks) * 1e-12)
    shares = []
    for one in (None, drafter):
        _, launches = ran(work, limits, 4, drafter=one)
        together = sum(steps for steps in launches.steps if steps > 1)
        shares.append(together / sum(launches.steps))
    assert shares[1] > 0.8 * shares[0] > 0.5


@pytest.mark.sample(2)
@pytest.mark.parametrize(("rows", "failing"), [(2, 4), (6, 4), (6, 5)])
@pytest.mark.parametrize("steps", [1, 3])
def test_running_out_of_memory_in_any_step_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, rows: int, failing: int, steps: int
) -> None:
    work = rows_of(rows, 25, ignore_eos=True)
    wanted, calls, sample = ran(work, EASY, 1)[0], list[int](), Sampler.next_tokens

    def next_tokens(self: Sampler, ops: Any, head: Any, hidden: Tensor, *rest: Any) -> Any:
        calls.append(len(hidden))
        if len(calls) >= failing and len(hidden) == rows:
            raise torch.OutOfMemoryError("there is none left")
        return sample(self, ops, head, hidden, *rest)

    monkeypatch.setattr(Sampler, "next_tokens", next_tokens)
    got, _ = ran(work, EASY, steps, graphs=True)
    assert got.answers == wanted.answers


def _given(completion: Any) -> int:
    broken = completion.error is not None and completion.error.code in ("nan_logits", "no_token_left")
    return len(completion.tokens.token_ids) + broken


def rows_of(count: int, most: int, **more: Any) -> Work:
    return Work(
        EASY, greedy([[i % 7, 3, i % 5] for i in range(count)], most, **more), [0] * count, (None,), 0, 0
    )


def test_steps_after_a_replayed_one_are_replayed_without_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of the stand-in model fits eight contexts."""
    prepared, moved, carried = list[int](), list[int](), list[bool]()
    run, further, plan = DecodeGraphs.run, RepeatedReplays.run, HashingOps.plan_captured

    def planned(*given: Any, before: Any = None, **more: Any) -> Any:
        carried.append(before is not None)
        return plan(*given, before=before, **more)

    monkeypatch.setattr(HashingOps, "plan_captured", planned)
    monkeypatch.setattr(DecodeGraphs, "run", lambda *given: prepared.append(1) or run(*given))
    monkeypatch.setattr(RepeatedReplays, "run", lambda *given: moved.append(1) or further(*given))
    work = rows_of(6, 25, ignore_eos=True)
    got, launches = ran(work, EASY, 3, graphs=True)
    assert launches.steps == [1, *[3] * 8]
    assert (len(prepared), len(moved)) == (12, 12), "in two launches contexts pass 8 and 24"
    assert carried == [False, *[True] * 11], "attention reuses the plan of the last step, one token later"
    assert got.answers == ran(work, EASY, 1)[0].answers
    assert [s.decode_tokens for s in got.steps] == [0, *[6] * 24]
    assert {s.launch for s in got.steps[1:]} == {"full_graph"}


def test_rows_that_end_in_the_middle_run_on_as_padding() -> None:
    """Single steps would have left these rows out of later steps."""
    work = rows_of(8, 30)
    single, got = ran(work, EASY, 1)[0], ran(work, EASY, 3)[0]
    stopped = sum(c.finish_reason == "stop" for c in got.completions.values())
    assert single.total("padded_tokens") == stopped > 2
    assert stopped < got.total("padded_tokens") <= 5 * stopped + 16
    for name in ("prefill_tokens", "decode_tokens", "sampled_tokens", "flops", "pairs", "kv_tokens"):
        assert got.total(name) == single.total(name), name
    assert got.total("metering_s") > 0


def test_shared_prefixes_are_read_once_per_step() -> None:
    shared = [3, 1, 4, 1, 5, 2, 6, 5, 3]
    requests = greedy([[*shared, row] for row in range(5)], 11, ignore_eos=True)
    work = Work(EASY, [*requests, request(9, [*shared, 7], 4, ignore_eos=True)], [0] * 6, (None,), 0, 0)
    single, got = ran(work, EASY, 1)[0], ran(work, EASY, 3)[0]
    assert got.total("kv_tokens") == single.total("kv_tokens") < got.total("pairs") - 8 * 4 * 10


def test_rows_with_non_finite_logits_end_with_an_error() -> None:
    """The logits of any step may be NaN. The row's later tokens are dropped."""
    work = replace(rows_of(12, 30, ignore_eos=True), nan_every=31)
    single, (got, launches) = ran(work, EASY, 1)[0], ran(work, EASY, 4)
    assert max(launches.steps) == 4
    assert got.answers == single.answers
    broken = [len(c.tokens.token_ids) % 4 for c in got.completions.values() if c.error is not None]
    assert len({*broken}) > 2, "some in the middle of a launch"


def test_known_ends_are_not_run_over() -> None:
    """A row gets no blocks for tokens that it may not have, and the others go on."""
    tight = replace(EASY, blocks=12, seqs=4)  # each row needs three blocks, all of them
    requests = [request(row, [row, 3, 1, 4], most, ignore_eos=True) for row, most in enumerate((9, 8, 9, 2))]
    work = Work(tight, requests, [0] * 4, (None,), 0, 0)
    got, launches = ran(work, tight, 4, graphs=True)
    assert [len(got.tokens(row)) for row in range(4)] == [9, 8, 9, 2]
    assert max(launches.steps) == 4
    assert got.total("preemptions") == 0
    assert got.answers == ran(work, EASY, 1)[0].answers


@pytest.mark.parametrize(("budget", "most"), [(9, 1), (10, 2), (19, 3), (20, 4)])
def test_steps_of_a_launch_respect_the_token_limit(budget: int, most: int) -> None:
    work, limits = rows_of(5, 30, ignore_eos=True), replace(EASY, budget=budget)
    got, launches = ran(work, limits, 4)
    assert max(launches.steps) == most
    assert got.answers == ran(work, EASY, 1)[0].answers


def test_with_few_blocks_steps_are_launched_singly() -> None:
    scarce = replace(EASY, blocks=9, seqs=3, scarce=True)
    work = rows_of(3, 25, ignore_eos=True)
    got, launches = ran(work, scarce, 4)
    assert 1 in launches.steps[4:]
    assert 4 in launches.steps
    assert got.total("preemptions") > 0
    assert got.answers == ran(work, EASY, 1)[0].answers


ASKS = {
    "penalty": {"repetition_penalty": 1.3},
    "least": {"min_tokens": 5},
    "logprobs": {"logprobs": 2},
    "bad": {"bad_tokens": ((1, 2), (3,))},
}


@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS)
def test_a_row_whose_token_depends_on_the_last_one_forces_single_steps(asks: dict[str, Any]) -> None:
    work = rows_of(3, 20, ignore_eos=True)
    odd = replace(work, rows=[*work.rows, request(9, [3, 4], 20, ignore_eos=True, **asks)])
    got, launches = ran(odd, EASY, 4)
    assert {*launches.steps} == {1}
    assert got.answers == ran(odd, EASY, 1)[0].answers


# ---- how many steps


def choose(device_s: float, rows: int = 64, length: float = 1000, most: int = 4) -> int:
    """Return the chosen number of steps for a step time of the device and a mean answer length in tokens."""
    chooser = MultiStepDecoding(AdmissionCosts(0.0, 1e-3, 3.5e-6, weights_s=device_s), most)
    chooser.record_tokens(int(100 * length), 100)
    return chooser.choose_steps(rows, 0)


def test_several_steps_are_launched_at_once_if_the_host_is_slower() -> None:
    assert choose(5e-3) == choose(1.25e-3) == 1, "the device is"
    assert [choose(s) for s in (1.0e-3, 0.7e-3)] == [2, 4]
    assert choose(0.3e-3) == 4, "the maximum"
    assert choose(3e-3, rows=1024) == 2, "each row is work for the host"
    assert choose(0.3e-3, length=12) < 4, "half of the tokens of short answers would be dropped"
    assert choose(0.3e-3, length=2) == 1
    assert choose(0.0) == 1, "the device time is unknown"


def test_lengths_of_answers_are_learnt_from_steps_and_ends() -> None:
    chooser = MultiStepDecoding(AdmissionCosts(0.0, 1e-3, 3.5e-6, weights_s=0.3e-3))
    assert chooser.choose_steps(64, 0) == 1, "nothing is known yet"
    chooser.record_tokens(150, 0)
    assert chooser.choose_steps(64, 0) == 4
    chooser.record_tokens(0, 75)
    assert chooser.choose_steps(64, 0) == 1


def test_the_documentation_quotes_the_expected_gain(capsys: pytest.CaptureFixture[str]) -> None:
    steps_at_once.main()
    assert capsys.readouterr().out in (Path(__file__).parents[3] / "docs/measurements/gpu.md").read_text()


@pytest.mark.slow
def test_the_documentation_quotes_the_expected_gain_of_a_job() -> None:
    assert steps_at_once.job_line(8) in (Path(__file__).parents[3] / "docs/measurements/gpu.md").read_text()


# ---- on a GPU, with Triton's kernels


@TRITON
@pytest.mark.parametrize("deterministic", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_on_a_gpu_logits_have_the_bits_of_single_steps(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """Greedy and sampled rows get a block within the launch, and another segment."""
    from tests.batchinfer.engine import test_triton_engine as gpu

    for module in ("attention_plan", "attention_splits", "part_room"):
        monkeypatch.setattr(f"batchinfer_kernels.gpu.{module}.SEGMENT", gpu.SEGMENT)
    loaded = gpu.loaded_as_a_job_does(monkeypatch, gpu.gpus_config("none", deterministic, rows=4))
    replayed, further = list[int](), RepeatedReplays.run
    monkeypatch.setattr(RepeatedReplays, "run", lambda *given: replayed.append(1) or further(*given))
    prompts = [[(7 * row + at) % 250 for at in range(n)] for row, n in enumerate((25, 29))]
    rows = [
        request(row, ids, 9 - row, ignore_eos=True, temperature=0.8 * row) for row, ids in enumerate(prompts)
    ]
    monkeypatch.setattr(Sampler, "tries_argmax", lambda *_: False)
    found, logits, sample = [], list[list[Tensor]](), Sampler.sample

    def noted(sampler: Sampler, ops: Any, given: Tensor, *rest: Any) -> SamplingResult:
        logits[-1].append(given.clone())
        return sample(sampler, ops, given, *rest)

    monkeypatch.setattr(Sampler, "sample", noted)
    for steps in (1, 3):
        monkeypatch.setattr(
            loaded_model, "MultiStepDecoding", lambda costs, n=steps: AlwaysRepeated(costs, n)
        )
        logits.append([])
        found.append(drain(loaded.engine(), rows))
    single, several = logits
    assert 3 < len(replayed) < len(single) == len(several)
    assert found[0].answers == found[1].answers
    assert all(torch.equal(*each) for each in zip(single, several, strict=True))
    assert loaded.runner.wants.repeats
