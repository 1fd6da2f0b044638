"""Tests draft heads on a GPU: steps are replayed, whole and in pieces, and keep the states that heads read."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

from batchinfer.core.request import Request
from batchinfer.engine.drafts.draft_model import DraftModelRunner
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.kept_states import KeptStates
from tests.batchinfer.eagle_heads import EagleOf, EagleReference, save_eagle
from tests.batchinfer.engine.asking_heads import FEW, Asking, HeadReference, parts_at_a_block
from tests.batchinfer.engine.small_engine import MIXED, checkpoint, drain, request
from tests.batchinfer.engine.test_drafted_graphs import ANSWER, loaded_for, loaded_on, rows_of
from tests.batchinfer.medusa_heads import heads_of, save_heads
from tests.batchinfer.mtp_layers import add_mtp
from tests.checkpoints import kept_folder
from tests.examples import first_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy

VOCAB, BLOCK = 260, 8
IDS = "eagle_aux_hidden_state_layer_ids"
SHARED = [at * at % 250 for at in range(30)]  # not up to the end of a block
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "top_p": 0.9},
    {"allowed_token_ids": FEW, "repetition_penalty": 1.2, "logprobs": 2},
    {"regex": "[a-c]{2}-[xy]{3,9}"},
    {"allowed_token_ids": FEW},
)
PLAIN, AMONG_FEW = (request(0, [1], ANSWER, **ASKED[at]).params for at in (0, 4))


class MedusaOf:
    """A reference of Medusa heads, which all read the state before a row's last token."""

    def __init__(self, heads: Any, model: Any) -> None:
        self._heads, self._model = heads, model.eval()

    @torch.no_grad()
    def proposed(self, tokens: Seq[int], count: int, allowed: Seq[int]) -> list[int]:
        found = self._model.model(torch.tensor([list(tokens[:-1])])).last_hidden_state[0, -1]
        return [int(head(found).argmax()) for head in self._heads][:count]


def eagle(family: str, **options: Any) -> tuple[Path, Path, HeadReference]:
    model = checkpoint(family, **options)
    torch.manual_seed(3)
    head = EagleReference(model.spec.hidden, VOCAB, 200)
    folder = save_eagle(kept_folder() / "head", head, VOCAB, **{IDS: [0, 1, 2]})
    source = AutoModelForCausalLM.from_pretrained(model.path).eval()
    return model.path, folder, EagleOf(head, source, (0, 1, 2))


def mtp() -> tuple[Path, Path, HeadReference]:
    folder = kept_folder()
    return folder, folder, add_mtp(folder, first_k_dense_replace=1)


def medusa() -> tuple[Path, Path, HeadReference]:
    model = checkpoint("llama", num_hidden_layers=1)
    plain = heads_of(model.spec.hidden, VOCAB, 3, 1)
    folder = save_heads(kept_folder() / "heads", plain, 1)
    return model.path, folder, MedusaOf(plain, AutoModelForCausalLM.from_pretrained(model.path))


KINDS: dict[str, Any] = {
    "medusa": medusa,
    "eagle": lambda: eagle("llama", num_hidden_layers=2),
    "mtp": mtp,
    "eagle, windows": lambda: eagle("qwen2", **MIXED),
}


def work(rows: int = 6) -> list[Request]:
    """Return rows that share a prefix which ends within a block, and others."""
    rng = random.Random(3)
    prompts = [
        [*SHARED, rng.randrange(250), row] if row % 3 else SHARED[: 3 + 2 * row] for row in range(rows)
    ]
    made = rows_of(prompts, ASKED)
    return [replace(one, shares_next=len(SHARED)) if row % 3 else one for row, one in enumerate(made)]


def forget(loaded: LoadedModel) -> None:
    """Clear a head's cache and states after the warm-up."""
    if isinstance(loaded.proposer, DraftModelRunner):
        own: Any = loaded.proposer.runner
        for layer in own.caches:
            for values in (layer.k, layer.v):
                values.fill_(float("nan"))
        own.model._kept.values.fill_(float("nan"))


@pytest.mark.parametrize("kind", first_of([*KINDS], 1))
def test_heads_propose_the_tokens_of_the_reference(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Steps are replayed as a whole, with and without drafts, in pieces, and with copies of partial blocks.
    Answers equal those without heads."""
    path, heads, reference = KINDS[kind]()
    wanted = drain(loaded_on("cpu", path).engine(), work())
    loaded = loaded_for(monkeypatch, path, heads=heads)
    assert isinstance(loaded.runner, DeviceRunner)
    forget(loaded)
    answers = {key: one.tokens.token_ids.tolist() for key, one in wanted.completions.items()}
    compared, right, launches, copied = 0, 0, set[str | None](), 0
    taken = noted_states(monkeypatch)
    for seed in range(1 + (kind == "eagle")):  # caches hold what was there before
        assert loaded.proposer is not None
        drafter = Asking(loaded.proposer, answers, seed)
        got = drain(loaded.engine(drafter=drafter), work())
        assert got.answers == wanted.answers
        assert got.logprobs.keys() == wanted.logprobs.keys()
        compared += compare(drafter, reference)
        right += sum(right for _, right in drafter.took)
        launches |= {step.launch for step in got.steps}
        copied += got.total("copied_tokens")
        assert drafter.left <= sum(sample.forced_tokens for sample in got.requests.values())
    assert compared >= 5
    assert right > 5
    assert launches == {"full_graph", "piecewise_graph"}
    assert copied > 0
    assert kind != "medusa" or len(taken) == len(got.steps)


def noted_states(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a list that receives the states kept per step, with copies.

    States must not change in later steps, although a graph writes each step's states to the same address.
    """
    taken, take = list[tuple[torch.Tensor, torch.Tensor]](), KeptStates.take

    def noted(kept: KeptStates, hidden: torch.Tensor, *step: Any) -> None:
        assert all(torch.equal(one, copy) for one, copy in taken[-2:])
        taken.append((hidden, hidden.clone()))
        take(kept, hidden, *step)

    monkeypatch.setattr(KeptStates, "take", noted)
    return taken


def compare(drafter: Asking, reference: HeadReference) -> int:
    """Compare some proposals with the reference and return their number."""
    rows = {row for row, _, _ in drafter.found}
    plain = {
        row
        for row in rows
        if row.request.params in (PLAIN, AMONG_FEW) and not parts_at_a_block(row, rows, BLOCK)
    }
    compared = [one for one in drafter.found if one[0] in plain]
    for row, tokens, proposed in compared:
        allowed = row.request.params.allowed_token_ids or range(VOCAB)
        wanted = reference.proposed(tokens, max(1, len(proposed)), list(allowed))
        # No draft follows a stop token or a state of NaN.
        assert proposed == wanted or (not proposed and wanted[0] in row.stop_token_ids)
    return sum(bool(proposed) for _, _, proposed in compared)
