"""Tests that answers do not depend on how work is split into steps, nor on look-ahead, and that all blocks are
freed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from batchinfer.core.request import Completion, Request
from batchinfer.engine.loop.drafting import Drafter
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.model_runner import ModelRunner
from tests.batchinfer.engine.hashing_model import EOS, VOCAB, hashing_runner, with_graphs
from tests.batchinfer.engine.random_work import EASY, Work, works
from tests.batchinfer.engine.small_engine import (
    Limits,
    Noted,
    Ran,
    at_once,
    drain,
    following,
    greedy,
    key_of,
    make_engine,
    request,
    watcher,
)
from tests.batchinfer.engine.word_constraints import WordConstraints, word
from tests.examples import examples

ROOM = 1 << 30


@dataclass(frozen=True)
class Way:
    """A way to run steps.

    Attributes:
        on_host: check tokens before masks are filled.
        forces: do not sample forced tokens.
        room: maximum number of tokens per step that fit into memory.
    """

    kind: Any = ModelRunner
    graphs: bool = False
    on_host: bool = False
    forces: bool = True
    room: int = ROOM
    verifies: bool = False  # whether steps with drafts have graphs, too
    steps: int = 1  # that are launched at once where rows only decode, at most

    def runner(self, limits: Limits, nan_every: int = 0, windows: tuple[int | None, ...] = (None,)) -> Any:
        made = hashing_runner(self.kind, limits.blocks, limits.block_size, nan_every, self.room, windows)
        drafts = self.verifies
        return with_graphs(made, limits.seqs, 40, limits.blocks, drafts=drafts) if self.graphs else made

    def run(self, work: Work, limits: Limits, drafter: Drafter | None = None) -> Ran:
        runner, constraints = (
            self.runner(limits, work.nan_every, work.windows),
            WordConstraints(EOS, self.forces),
        )
        runner, masks = following(runner, constraints, self.on_host)
        asked = {"stop_streams": watcher, "masks": masks, "drafter": drafter}
        engine = make_engine(runner, limits, frozenset([EOS]), repeated=at_once(self.steps), **asked)
        return drain(engine, work.rows, arrivals=work.arrivals)


AHEAD = Way(DeviceRunner)
WAYS = st.builds(Way, on_host=st.booleans()) | st.builds(
    Way,
    st.just(DeviceRunner),
    graphs=st.booleans(),
    on_host=st.booleans(),
    room=st.sampled_from([ROOM, ROOM, 7]),
    verifies=st.booleans(),
    steps=st.integers(1, 5),
)


@settings(max_examples=examples(10, 250), deadline=None, print_blob=True)
@given(works(may_constrain=True), WAYS)
def test_answers_do_not_depend_on_how_the_work_is_split(work: Work, way: Way) -> None:
    """Rows of all kinds, broken logits, windows, preemptions, look-ahead, graphs and partly filled masks."""
    wanted, got = Way(forces=False).run(work, EASY), way.run(work, work.limits)
    assert got.answers == wanted.answers
    assert got.logprobs == wanted.logprobs
    answers = got.completions.values()
    broken = sum(c.error is not None and c.error.code in ("nan_logits", "no_token_left") for c in answers)
    given = sum(len(c.tokens.token_ids) for c in answers) + broken
    forced = sum(sample.forced_tokens for sample in got.requests.values())
    assert got.total("sampled_tokens") + forced == given
    for row in work.rows:
        said = got.completions[row.key].tokens.token_ids.tolist()
        assert not row.params.allowed_token_ids or {*said} <= set(row.params.allowed_token_ids)
        for bad in map(list, row.params.bad_tokens):
            assert not any(said[at : at + len(bad)] == bad for at in range(len(said)))
        if row.params.choice:
            check(row, got.completions[row.key])
    for name in ("preemptions", "forced_tokens", "padded_tokens"):
        event(f"{name}: {got.total(name) > 0}")


def check(row: Request, answer: Completion) -> None:
    """Check that a complete answer is allowed, and that an error keeps the tokens of an incomplete one."""
    said = word([token for token in answer.tokens.token_ids.tolist() if token != EOS])
    if answer.error is None:
        assert (answer.finish_reason, answer.tokens.text_length) == ("stop", None)
        assert said in row.params.choice
    else:
        assert answer.error.code == "incomplete_output" or (
            answer.error.code == "no_token_left" and row.params.forbids_tokens
        )
        assert any(text.startswith(said) for text in row.params.choice)


def run(way: Way, rows: Seq[Request], limits: Limits = EASY, drafter: Drafter | None = None) -> Ran:
    return way.run(Work(limits, list(rows), [], (None,), 0, 0), limits, drafter)


def rows(count: int, most: int, **more: Any) -> list[Request]:
    return greedy([[i % VOCAB, 3, i % 5] for i in range(count)], most, **more)


@pytest.mark.parametrize("way", [Way(), Way(on_host=True), AHEAD], ids=["host", "looking", "ahead"])
def test_rows_for_which_no_token_is_left_end_with_the_reason(way: Way) -> None:
    """A forced token that is not allowed is not appended."""
    work = [
        request(0, [3, 4], 9, choice=("bcdd",), allowed_token_ids=(1, 2)),
        request(1, [3, 4], 9, allowed_token_ids=(EOS, 5), stop_token_ids=(5,), min_tokens=4),
        request(2, [3, 4], 9, choice=("bcdd", "bcc"), allowed_token_ids=(1, 2), temperature=1.0),
        request(3, [3, 4], 9, allowed_token_ids=(7,)),
        request(4, [3, 4], 9, choice=("bcdd",), bad_tokens=((3, 3),)),
        request(5, [3, 4], 9, allowed_token_ids=(5, 7), bad_tokens=((5,), (7, 7), (3, 4, 7))),
    ]
    got = run(way, work)
    bad = [got.completions[work[row].key] for row in (0, 1, 4, 5)]
    assert [one.error and one.error.code for one in bad] == ["no_token_left"] * 4
    assert [word(one.tokens.token_ids.tolist()) for one in bad] == ["bc", "", "bcd", "h"]
    assert bad[0].error is not None
    assert "the constraint allows" in bad[0].error.message
    assert [(word(got.tokens(row)), got.answers[key_of(row)][1]) for row in (2, 3)] == [
        ("bcc", "stop"),
        ("h" * 9, "length"),
    ]


def test_the_next_step_is_launched_before_the_tokens_of_this_one_are_read() -> None:
    noted = Noted(AHEAD.runner(EASY))
    drain(make_engine(noted, EASY, frozenset()), rows(3, 4))
    assert [step.unread for step in noted.steps] == [0, 1, 1, 1], "a known last token is not run behind"
    assert noted.read == 4


def test_a_row_that_stops_ran_one_token_too_many_which_counts_as_padding() -> None:
    wanted, got = run(Way(), rows(8, 30)), run(AHEAD, rows(8, 30))
    stopped = sum(c.finish_reason == "stop" for c in got.completions.values())
    assert stopped > 2
    assert (got.total("padded_tokens"), wanted.total("padded_tokens")) == (stopped, 0)
    for name in ("prefill_tokens", "decode_tokens", "sampled_tokens", "flops"):
        assert got.total(name) == wanted.total(name), name


def test_rows_are_preempted_only_when_no_token_is_awaited() -> None:
    """`Scheduler` asserts it; the test provokes the case."""
    scarce, work = Limits(blocks=12, block_size=4, seqs=6, scarce=True), rows(6, 25, ignore_eos=True)
    got = run(AHEAD, work, scarce)
    assert got.total("preemptions") > 0
    assert got.answers == run(Way(), work).answers


def test_times_of_overlapping_steps_do_not() -> None:
    steps = run(AHEAD, rows(4, 10, ignore_eos=True)).steps
    for before, after in pairwise(steps):
        assert after.started_s >= before.started_s + before.duration_s - 1e-9
    assert all(0 <= s.model_s <= s.duration_s for s in steps)
