"""Tests published EAGLE-3 heads, which share the blocks of their model, for all kinds of rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from batchinfer.core.errors import JobFileError, SecurityRefusal
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.heads.inspection import inspect_heads
from batchinfer.models.heads.stored_heads import StoredLayer
from tests.batchinfer.eagle_heads import SIZES, EagleOf, EagleReference, save_eagle
from tests.batchinfer.engine.asking_heads import Asking, compare_drawn, compare_sharing, run, with_head
from tests.batchinfer.engine.random_work import EASY, Work, works
from tests.batchinfer.engine.small_engine import (
    MIXED,
    Watched,
    checkpoint,
    greedy,
)
from tests.checkpoints import kept_folder
from tests.examples import examples

VOCAB = 260
IDS = "eagle_aux_hidden_state_layer_ids"
Proposed = Callable[[Seq[int], int], list[int]]


@dataclass(frozen=True, eq=False)
class Kind:
    """A model and one of its heads in a published layout.

    Attributes:
        layers: layers whose inputs the head reads.
    """

    family: str
    options: dict[str, Any]
    layers: tuple[int, ...]
    draft_vocab: int = 200
    start: str = "midlayer."
    said: dict[str, Any] = field(default_factory=dict)
    own_embedding: bool = False
    without: tuple[str, ...] = ()


DEEP = {"num_hidden_layers": 8}
KINDS = {
    "authors": Kind("llama", DEEP, (2, 4, 5)),
    "speculators": Kind(
        "llama",
        DEEP,
        (1, 3, 8),
        start="layers.0.",
        said={IDS: [1, 3, 8], "norm_before_residual": True},
        own_embedding=True,
    ),
    "all tokens": Kind(
        "llama", DEEP, (1, 3, 6), VOCAB, said={"eagle_config": {IDS: [5, 0, 2]}}, without=("d2t", "t2d")
    ),
    "windows": Kind("qwen2", MIXED, (0, 1, 2), said={IDS: [0, 1, 2]}),
}


@cache
def made(name: str) -> tuple[Checkpoint, StoredLayer, EagleOf]:
    kind = KINDS[name]
    model = checkpoint(kind.family, **kind.options)
    norms = bool(kind.said.get("norm_before_residual"))
    torch.manual_seed(3)
    head = EagleReference(model.spec.hidden, VOCAB, kind.draft_vocab, kind.own_embedding, norms)
    folder = save_eagle(kept_folder() / "head", head, VOCAB, kind.start, **kind.said)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {key: one for key, one in weights.items() if key not in kind.without}, folder / "model.safetensors"
    )
    stored = inspect_heads(folder, model)
    assert isinstance(stored, StoredLayer)
    assert stored.tapped == kind.layers
    assert stored.weight_bytes(2) == 2 * sum(
        one.numel() for one in weights.values() if one.is_floating_point()
    )
    source = AutoModelForCausalLM.from_pretrained(model.path).eval()
    return model, stored, EagleOf(head, source, kind.layers)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(3, 80), deadline=None, print_blob=True)
@given(work=works(may_constrain=False))
def test_a_head_proposes_the_tokens_of_the_reference(kind: str, work: Work) -> None:
    """Chunks, shared prefixes, copied blocks, preemptions and right drafts leave no unwritten state in use."""
    compare_drawn(*made(kind), work)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_reads_shared_prefixes(kind: str) -> None:
    compare_sharing(*made(kind), 40)


def weights_changed(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the stored tensors of a head."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.fixture
def published(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return save_eagle(tmp_path / "head", EagleReference(48, VOCAB, 200), VOCAB)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("fc.weight"), r"model\.safetensors has no tensor fc\.weight"),
        (lambda w: w.pop("d2t"), "has no tensor d2t, which maps the tokens of the head"),
        (
            lambda w: w.update({"midlayer.mlp.up_proj.weight": torch.zeros(8, 48)}),
            r"midlayer\.mlp\.up_proj\.weight is of shape .8, 48., and the model's heads are of .40, 48.",
        ),
        (
            lambda w: w.update({"fc.bias": torch.zeros(48)}),
            r"has the tensor fc\.bias, which no EAGLE-3 head of one",
        ),
        (
            lambda w: w.update({"norm.weight": torch.zeros(48, dtype=torch.int8)}),
            r"norm\.weight is stored as I8; floating-point numbers are needed",
        ),
        (
            lambda w: w.update({"d2t": torch.full((200,), 61)}),
            r"d2t makes 260 of the head's token 199; the model has 260",
        ),
        (lambda w: w.update({"d2t": -torch.arange(200)}), "d2t makes the same token of two of the head's"),
        (lambda w: w.update({"d2t": torch.zeros(200, dtype=torch.int64)}), "t2d names other tokens than d2t"),
        (
            lambda w: w.update({"d2t": torch.zeros(200)}),
            r"d2t is F32 of shape .200,.; wanted I64 of shape .200,.",
        ),
        (
            lambda w: w.update({"t2d": torch.zeros(7, dtype=torch.bool)}),
            r"t2d is BOOL of shape .7,.; wanted BOOL of shape .260,.",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    published: Path, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    weights_changed(published, change)
    with pytest.raises(JobFileError, match=message):
        inspect_heads(published, checkpoint("llama", **DEEP))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; heads of one layer are supported"),
        ({"vocab_size": 300}, "vocab_size is 300, and the model's 260"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64, and the model's hidden_size 48"),
        ({IDS: [1, 2, 9]}, rf"{IDS} is .1, 2, 9.; wanted 3 different ones from 0 to 8"),
        (
            {"eagle_config": {IDS: [1, 2, 8]}},
            rf"eagle_config.{IDS} is .1, 2, 8.; wanted 3 different ones from -1 to 7",
        ),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            "use_aux_hidden_state is false; EAGLE-3 reads three",
        ),
        ({"hidden_act": "tanhh"}, "hidden_act 'tanhh' is not supported"),
        ({"num_attention_heads": "four"}, "num_attention_heads is 'four'; wanted an integer"),
        ({"norm_before_residual": "no"}, "norm_before_residual is 'no'; wanted true or false"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(
    published: Path, said: dict[str, Any], message: str
) -> None:
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps(config | said))
    with pytest.raises(JobFileError, match=message):
        inspect_heads(published, checkpoint("llama", **DEEP))


def test_folders_with_a_wrong_eagle_head_are_refused(published: Path) -> None:
    few = checkpoint("llama")
    with pytest.raises(JobFileError, match=f"a model of 2 layers needs {IDS}: 3 different ones from 0 to 2"):
        inspect_heads(published, few)
    model, weights = checkpoint("llama", **DEEP), published / "model.safetensors"
    stored = weights.read_bytes()
    weights.write_bytes(stored[:-1])
    with pytest.raises(SecurityRefusal, match=r"model\.safetensors"):
        inspect_heads(published, model)
    weights.unlink()
    with pytest.raises(JobFileError, match=r"no weights: model\.safetensors"):
        inspect_heads(published, model)
    (published / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(
        JobFileError,
        match=r"pytorch_model\.bin is a pickle, which is not read: save its tensors as model\.safetensors",
    ):
        inspect_heads(published, model)
    (published / "config.json").write_text(json.dumps(SIZES))
    with pytest.raises(JobFileError, match=r"heads of an unknown kind: config\.json has neither"):
        inspect_heads(published, model)


def test_a_head_without_logits_of_its_own_has_the_models(published: Path) -> None:
    """SafeAILab's code only remaps tokens if the head has fewer tokens than the model."""
    model = checkpoint("llama", **DEEP)
    weights_changed(published, lambda w: [w.pop(name) for name in ("lm_head.weight", "d2t", "t2d")])
    config = json.loads((published / "config.json").read_text())
    del config["draft_vocab_size"]
    (published / "config.json").write_text(json.dumps(config))
    stored = inspect_heads(published, model)
    assert isinstance(stored, StoredLayer)
    _, beside = with_head(model, stored, EASY)
    own: Any = beside.runner
    states = torch.randn(5, 48)
    with torch.inference_mode():
        logits = own.model.logits(states)
        assert torch.equal(own.model.argmax(states), logits.argmax(-1))
        normed = own.model.states(states)
    head = AutoModelForCausalLM.from_pretrained(model.path).lm_head.weight.detach()
    torch.testing.assert_close(logits, normed @ head.T)


def test_rows_of_a_prefix_read_its_states_once() -> None:
    """The head reads a shared prefix once, and later only its last position again."""
    model, stored, _ = made("authors")
    runner, beside = with_head(model, stored, EASY)
    tokens = list[int]()
    counting: Any = Watched(beside.runner, lambda plan: tokens.append(len(plan.tokens)))
    shared = [at % 7 for at in range(30)]
    rows = [
        replace(one, shares_next=30)
        for one in greedy([[*shared, row, row] for row in range(8)], 4, ignore_eos=True)
    ]
    limits = replace(EASY, seqs=2)
    work = Work(limits, rows, [], (None,), 0, 0)
    drafter = Asking(replace(beside, runner=counting), {row.key: [] for row in rows}, 0)
    run(model, work, runner, drafter)
    asked = {row for row, _, _ in drafter.found}
    assert len(asked) > 4
    proposals = sum(len(proposed) for _, _, proposed in drafter.found)
    assert sum(tokens) < 30 + len(asked) * (2 + 4 + 4) + proposals + len(drafter.found)
