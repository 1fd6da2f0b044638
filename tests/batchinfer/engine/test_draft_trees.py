"""Trees of drafts change no answer, and are right where a chain would be wrong."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.batchinfer.engine.random_work import EASY, Work, works
from tests.batchinfer.engine.speculating import Drafts, branching
from tests.batchinfer.engine.test_look_ahead import Way
from tests.examples import examples


@settings(max_examples=examples(40, 300), deadline=None, print_blob=True)
@given(works(may_constrain=True), st.booleans(), st.sampled_from([0.3, 0.6, 0.9]))
def test_answers_do_not_depend_on_trees_of_drafts(work: Work, on_host: bool, right: float) -> None:
    """Rows of any kind, broken logits, arrivals, chunks, preemptions, forced tokens and constraints; the model's tokens
    depend on every token before them, and on where each stands."""
    work = replace(work, windows=(None,))
    wanted, way = Way(forces=False).run(work, EASY), Way(on_host=on_host)
    drafts = Drafts(branching(wanted, right, work.seed))
    got = way.run(work, work.limits, drafts)
    assert got.answers == wanted.answers
    assert got.logprobs == wanted.logprobs
    given = sum(len(c.tokens.token_ids) for c in got.completions.values())
    given += sum(
        c.error is not None and c.error.code in ("nan_logits", "no_token_left")
        for c in got.completions.values()
    )
    forced = sum(sample.forced_tokens for sample in got.requests.values())
    assert got.total("sampled_tokens") + forced == given
    forcing = Way().run(work, EASY).requests
    steered = {key: (sample.steered, sample.forced_tokens) for key, sample in got.requests.items()}
    assert steered == {key: (sample.steered, sample.forced_tokens) for key, sample in forcing.items()}
    drafted, accepted = (sum(column) for column in zip(*drafts.took, (0, 0), strict=True))
    event(
        f"accepted: {accepted > 0}, rejected: {accepted < drafted}, preempted: {got.total('preemptions') > 0}"
    )
