"""Tests published Medusa heads, and the state that they are queried with."""

from __future__ import annotations

import json
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchinfer.core.errors import JobFileError, SecurityRefusal
from batchinfer.engine.drafts.medusa import MedusaHeads, MedusaRunner, MedusaSource
from batchinfer.engine.runner.kept_states import KeptStates
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.schedule.step_plan import SamplingPlan
from batchinfer.models.heads.inspection import inspect_heads
from batchinfer.models.heads.stored_medusa import StoredMedusa
from tests.batchinfer.engine.hashing_model import EOS, state_of
from tests.batchinfer.engine.random_work import EASY, Work, works
from tests.batchinfer.engine.small_engine import checkpoint, drain, following, make_engine, watcher
from tests.batchinfer.engine.speculating import Drafts, remembered
from tests.batchinfer.engine.test_drafts import PEAKS
from tests.batchinfer.engine.test_look_ahead import Way
from tests.batchinfer.engine.word_constraints import WordConstraints
from tests.batchinfer.medusa_heads import heads_of, save_heads
from tests.examples import examples


@pytest.mark.parametrize(("count", "layers", "stated"), [(3, 1, 3), (5, 2, 2)])
def test_heads_propose_the_tokens_of_the_reference(
    tmp_path: Path, count: int, layers: int, stated: int
) -> None:
    model = checkpoint("llama")
    spec = model.spec
    plain = heads_of(spec.hidden, spec.vocab, count, layers)
    stored = inspect_heads(save_heads(tmp_path / "heads", plain, layers, stated), model)
    assert isinstance(stored, StoredMedusa)
    assert (stored.count, stored.layers) == (count, layers)
    assert stored.weight_bytes(4) == 4 * sum(one.numel() for one in plain.state_dict().values())
    heads = MedusaHeads.load(stored, torch.float32, torch.device("cpu"))
    states = torch.randn(7, spec.hidden)
    with torch.inference_mode():
        wanted = torch.stack([head(states).argmax(-1) for head in plain], 1)
    assert torch.equal(heads.tokens(states, count)[:, :, 0], wanted)
    assert torch.equal(heads.tokens(states, 2)[:, :, 0], wanted[:, :2])
    with torch.inference_mode():
        best = torch.stack([head(states).sort(descending=True).indices[:, :5] for head in plain], 1)
    assert torch.equal(heads.tokens(states, count, 5), best)
    assert len(wanted.unique()) > 5


def changed(folder: Path, config: dict[str, Any]) -> None:
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | config))


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = checkpoint("llama")
    hidden, vocab = model.spec.hidden, model.spec.vocab
    wide = save_heads(tmp_path / "wide", heads_of(hidden + 4, vocab, 2, 1), 1)
    with pytest.raises(
        JobFileError, match=r"0\.0\.linear\.weight is of shape .52, 52., and the model's heads are of"
    ):
        inspect_heads(wide, model)
    deep = save_heads(tmp_path / "deep", heads_of(hidden, vocab, 2, 2), 1)
    with pytest.raises(JobFileError, match=r"has the tensor 0\.1\.linear\.bias, which no Medusa head has"):
        inspect_heads(deep, model)
    few = save_heads(tmp_path / "few", heads_of(hidden, vocab, 2, 1), 1, stated=4)
    with pytest.raises(JobFileError, match=r"has 2 heads, and config\.json says 4"):
        inspect_heads(few, model)
    changed(few, {"medusa_num_heads": "two"})
    with pytest.raises(JobFileError, match="medusa_num_heads is 'two'; wanted an integer from 1 to 16"):
        inspect_heads(few, model)
    damaged = save_heads(tmp_path / "damaged", heads_of(hidden, vocab, 2, 1), 1)
    weights = damaged / "medusa_lm_head.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(SecurityRefusal, match=r"medusa_lm_head\.safetensors"):
        inspect_heads(damaged, model)
    weights.unlink()
    with pytest.raises(JobFileError, match=r"has no medusa_lm_head\.safetensors"):
        inspect_heads(damaged, model)
    (damaged / "medusa_lm_head.pt").write_bytes(b"pickled")
    with pytest.raises(JobFileError, match="is a pickle, which is not read: save its tensors as"):
        inspect_heads(damaged, model)
    with pytest.raises(JobFileError, match="nowhere is missing; a folder is needed"):
        inspect_heads(tmp_path / "nowhere", model)


class Telling:
    """Replaces heads and the model's norm: returns the states that it receives."""

    def __init__(self) -> None:
        self.heads, self.seen = [None] * 3, list[int]()

    def states(self, hidden: Tensor) -> Tensor:
        return hidden

    def tokens(self, states: Tensor, count: int, ranks: int) -> Tensor:
        self.seen = states[:, 0].tolist()
        return torch.zeros(len(states), count, ranks, dtype=torch.int64)


@dataclass
class Asked(Drafts):
    """Queries heads about all possible rows, and proposes other tokens."""

    def __init__(self, heads: MedusaSource, told: Telling, guess: Any) -> None:
        super().__init__(guess)
        self.heads, self.told, self.asked, self.left = heads, told, 0, 0

    def propose(self, rows: Seq[Sequence], ahead: int, others: int) -> Iterable[tuple[Sequence, Seq[int]]]:
        asked = [row for row in rows if self.heads.can_draft(row)]
        self.left += sum(row.output_length > 0 for row in rows) - len(asked)
        if asked:
            assert [one.tokens for one in self.heads.propose(asked, 2)] == [[0, 0]] * len(asked)
            assert self.told.seen == [state_of(row.tokens[:-1]) for row in asked]
            self.asked += len(asked)
        return super().propose(rows, ahead, others)

    def finish(self, sequence: Sequence) -> None:
        self.heads.finish(sequence)


@settings(max_examples=examples(12, 250), deadline=None, print_blob=True)
@given(works(may_constrain=True), st.sampled_from([0.0, 0.6, 1.0]))
def test_heads_get_the_state_before_the_last_sampled_token(work: Work, right: float) -> None:
    """With chunks, preemptions, arriving rows and any share of right drafts. A forced last token has no
    state."""
    work = replace(work, windows=(None,))
    wanted, told, kept = Way(forces=False).run(work, EASY), Telling(), KeptStates()
    runner = Way().runner(work.limits, work.nan_every)
    runner = replace(runner, kept=kept, wants=runner.wants._replace(requests=True))
    runner, masks = following(runner, WordConstraints(EOS, True))
    heads: Any = told
    drafter = Asked(
        MedusaSource(MedusaRunner(heads, heads, kept, 10, 4), PEAKS),
        told,
        remembered(wanted, right, work.seed),
    )
    engine = make_engine(
        runner, work.limits, frozenset([EOS]), stop_streams=watcher, masks=masks, drafter=drafter
    )
    got = drain(engine, work.rows, arrivals=work.arrivals)
    assert got.answers == wanted.answers
    assert not kept._of, "a row that has ended is remembered"
    forced = sum(sample.forced_tokens for sample in got.requests.values())
    assert drafter.left <= forced
    event(f"asked: {drafter.asked > 0}, forced: {drafter.left > 0}")


def test_states_of_two_steps_are_kept_separately() -> None:
    """A row may be queried about the step before the newest one, and has several states with drafts."""
    kept, made = KeptStates(2), torch.arange(8.0)[:, None]
    for hidden, lengths, requests in (
        (made[:4], [1, 3], [(b"left", 0), (b"row", 4)]),
        (made[4:], [2, 1, 1], [(b"drafted", 2), (b"other", 6), (b"new", 0)]),
    ):
        step: Any = SimpleNamespace(
            sampling=SamplingPlan(), tokens=hidden[:, 0].tolist(), sampled=None, chunk_lengths=lengths,
            requests=requests,
        )  # fmt: skip
        kept.take(hidden, step, step)
    asked = [(b"row", 4), (b"new", 1), (b"left", 1), (b"drafted", 3), (b"row", 5), (b"other", 7)]
    assert all(kept.has(*one) for one in asked)
    assert kept.of(asked).flatten().tolist() == [2, 7, 0, 5, 3, 6]
