"""Tests that models which transformers' code cannot run over our cache are rejected with a reason."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.phi.modeling_phi import PhiMLP

from batchinfer.core.errors import JobFileError, SecurityRefusal, Unavailable
from batchinfer.models.families.registry import FAMILIES
from batchinfer.models.foreign import checkpoint as checkpoints
from batchinfer.models.foreign.checkpoint import describe_in_child, inspect_foreign
from batchinfer.models.foreign.probe import describe, serve
from batchinfer.models.foreign.recorder import MaskFunction, window_of
from batchinfer.models.foreign.source import ForeignSource
from batchinfer.models.foreign.spec import CannotRun
from batchinfer.models.opening import open_checkpoint
from batchinfer.models.ops.choose import Arithmetic
from batchinfer.models.sources import checkpoint_source
from tests.batchinfer.models.foreign.kit import LONGEST, PLACE, Foreign, make, raw_config
from tests.checkpoints import edit_json, kept_folder, make_checkpoint
from tests.foreign_models import RUNS, make_foreign, other_types, stated
from tests.foreign_table import attention_on_page, reason_of, reasons_on_page

# One for each reason
SOME = ("bart", "bloom", "camembert", "diffllama", "doge", "falcon", "jamba", "llama4", "minimax_m3_vl_text")


@pytest.fixture(scope="module")
def phi() -> Foreign:
    return make("phi")


@pytest.fixture
def own(phi: Foreign, tmp_path: Path) -> Path:
    """Return a copy of the model's folder that a test may change."""
    for file in phi.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def kinds() -> list[Any]:
    return [
        pytest.param(kind, marks=[] if kind in SOME else [pytest.mark.slow], id=kind)
        for kind in other_types()
    ]


@pytest.mark.parametrize("kind", kinds())
def test_the_page_says_why(kind: str) -> None:
    assert reasons_on_page()[kind] == reason_of(kind)


def test_the_page_has_every_type() -> None:
    """After adding a family or upgrading transformers, run: python -m tests.foreign_table."""
    assert set(attention_on_page()) == set(RUNS) - set(FAMILIES)
    assert set(reasons_on_page()) == set(other_types())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "banana"}, "model_type 'banana' is not supported: transformers knows no model"),
        ({"quantization_config": {"bits": 4}}, "only float weights are supported"),
        ({"architectures": ["PhiForTokenClassification"]}, r"\['PhiForCausalLM'\] would run"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longest row of a batch"),
        ({"num_attention_heads": 0}, "cannot be run without weights"),
        ({"hidden_size": "wide"}, "transformers does not accept config.json"),
        ({"max_position_embeddings": ...}, ""),
    ],
)
def test_configurations(own: Path, changes: dict[str, Any], text: str) -> None:
    edit_json(own / "config.json", **changes)
    if not text:  # transformers' default counts
        assert inspect_foreign(own, describe).spec.max_positions == 2048
        return
    with pytest.raises(JobFileError, match=text):
        inspect_foreign(own, describe)


def test_tokens_that_end_nothing(own: Path) -> None:
    (own / "generation_config.json").write_text('{"eos_token_id": [7, -3]}')
    with pytest.raises(JobFileError, match=r"generation_config.json: eos_token_id"):
        inspect_foreign(own, describe)


def changed(own: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(own / "model.safetensors")
    change(tensors)
    save_file(tensors, own / "model.safetensors", metadata={"format": "pt"})


BIAS, MORE, HEAD = "model.layers.1.self_attn.q_proj.bias", "model.layers.3.mlp.fc1.bias", "lm_head.bias"


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        (BIAS, None, f"missing tensors: {BIAS}"),
        (MORE, torch.ones(3), f"unexpected tensors: {MORE}"),
        (HEAD, torch.ones(7), f"tensors of a wrong shape: {HEAD}"),
    ],
)
def test_weights_of_another_model(own: Path, name: str, tensor: Tensor | None, text: str) -> None:
    changed(own, lambda stored: stored.pop(name) if tensor is None else stored.update({name: tensor}))
    source = ForeignSource(inspect_foreign(own, describe))
    with pytest.raises(JobFileError, match=text):
        source.load(source.choose_ops(PLACE), PLACE)


def test_dtypes_that_are_no_numbers_of_a_model(own: Path) -> None:
    changed(own, lambda tensors: tensors.update({"lm_head.bias": torch.ones(260).to(torch.float8_e4m3fn)}))
    with pytest.raises(JobFileError, match=r"not float: lm_head.bias \(F8_E4M3\)"):
        inspect_foreign(own, describe)


class TestSecurity:
    def test_a_known_type_with_remote_code_is_run_by_transformers_own_class(
        self, phi: Foreign, own: Path
    ) -> None:
        edit_json(own / "config.json", auto_map={"AutoModelForCausalLM": "modeling_phi.PhiForCausalLM"})
        (own / "modeling_phi.py").write_text("raise SystemExit('code of the checkpoint was run')")
        found = ForeignSource(inspect_foreign(own, describe))
        ops = found.choose_ops(PLACE)
        model = found.load(ops, PLACE)(ops, LONGEST)
        assert model.spec == phi.checkpoint.spec

    def test_an_unknown_type_with_remote_code(self, own: Path) -> None:
        edit_json(own / "config.json", auto_map={"AutoConfig": "x.X"}, model_type="banana")
        with pytest.raises(SecurityRefusal, match="has an auto_map"):
            inspect_foreign(own, describe)

    def test_code_of_the_tokenizer(self, own: Path) -> None:
        (own / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": "x.X"}}')
        with pytest.raises(SecurityRefusal, match=r"tokenizer_config.json has an auto_map"):
            inspect_foreign(own, describe)
        (own / "tokenizer.json").write_text("{}")
        assert "which is not run" in inspect_foreign(own, describe).notices[1]

    def test_a_quantized_model_with_remote_code(self, own: Path) -> None:
        """Its remote code is not the reason for the error."""
        edit_json(own / "config.json", auto_map={"AutoConfig": "x.X"}, quantization_config={"bits": 4})
        with pytest.raises(JobFileError, match="it is a quantized checkpoint"):
            inspect_foreign(own, describe)

    def test_only_checked_files_are_read(self, own: Path) -> None:
        """Neither weights named in config.json, nor an adapter's model, nor kernels of a hub."""
        edit_json(
            own / "config.json",
            transformers_weights="../other.safetensors",
            _attn_implementation="org/kernel",
            attn_implementation="org/kernel",
            experts_implementation="org/kernel",
        )
        (own / "adapter_config.json").write_text('{"base_model_name_or_path": "/nowhere"}')
        source = ForeignSource(inspect_foreign(own, describe))
        assert source.load(source.choose_ops(PLACE), PLACE)


@pytest.mark.parametrize(
    ("quantization", "deterministic"),
    [("int8", False), ("none", True)],
)
def test_arithmetic_that_transformers_code_does_not_have(
    phi: Foreign, quantization: Any, deterministic: bool
) -> None:
    source = replace(phi.source, quantization=quantization)
    with pytest.raises(Unavailable, match="phi is computed by transformers' code"):
        source.choose_ops(replace(PLACE, deterministic=deterministic))


def test_a_model_that_mixes_tokens_is_found_out(phi: Foreign, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step, the token before may belong to another row or another step."""
    plain = PhiMLP.forward

    def shifted(self: Any, x: Tensor) -> Tensor:
        out: Tensor = plain(self, x + 0.2 * torch.roll(x, 1, dims=1))
        return out

    monkeypatch.setattr(PhiMLP, "forward", shifted)
    with pytest.raises(JobFileError, match="get other logits than alone"):
        phi.loaded()


def test_positions_that_are_lost_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding

    opt, plain = make("opt"), OPTLearnedPositionalEmbedding.forward

    def counted(self: Any, attention_mask: Tensor, past: int = 0, position_ids: Tensor | None = None) -> Any:
        return plain(self, attention_mask, past, torch.arange(attention_mask.shape[1])[None])

    monkeypatch.setattr(OPTLearnedPositionalEmbedding, "forward", counted)
    with pytest.raises(JobFileError, match="get other logits than alone"):
        opt.loaded()


def test_logits_that_are_no_numbers(own: Path) -> None:
    changed(own, lambda tensors: tensors["model.layers.0.mlp.fc1.weight"].fill_(1e38))
    source = ForeignSource(inspect_foreign(own, describe))
    with pytest.raises(JobFileError, match=r"no finite numbers in this dtype; take another model.dtype"):
        source.load(source.choose_ops(PLACE), PLACE)


@pytest.mark.parametrize(("kind", "dtype"), [("phi", torch.bfloat16), ("opt", torch.float16)])
def test_half_precision_passes_the_check(kind: str, dtype: torch.dtype) -> None:
    source = make(kind).source
    place = Arithmetic(dtype, torch.device("cpu"))
    assert source.load(source.choose_ops(place), place)


class TestMasks:
    @pytest.mark.parametrize(
        ("mask", "window"),
        [
            (causal_mask_function, None),
            (sliding_window_causal_mask_function(24), 24),
            (sliding_window_causal_mask_function(1), 1),
            (sliding_window_causal_mask_function(99), 99),
            (sliding_window_causal_mask_function(100), None),
            (sliding_window_causal_mask_function(5000), None),
        ],
    )
    def test_windows(self, mask: MaskFunction, window: int | None) -> None:
        assert window_of(mask, 100) == window

    @pytest.mark.parametrize(
        "mask", [bidirectional_mask_function, chunked_causal_mask_function(32, torch.zeros(1))]
    )
    def test_others(self, mask: MaskFunction) -> None:
        with pytest.raises(CannotRun, match="neither causal nor a sliding window"):
            window_of(mask, 100)

    def test_one_that_looks_at_the_tokens(self) -> None:
        seen = torch.ones(1, 7, device="meta")
        with pytest.raises(CannotRun, match="more than positions"):
            window_of(lambda b, h, q, kv: seen[b, kv], 100)


class TestApart:
    def test_the_same_as_here(self, phi: Foreign) -> None:
        raw = raw_config(phi.folder)
        assert describe_in_child(raw, {"eos_token_id": [7, 9]}) == describe(raw, {"eos_token_id": [7, 9]})

    def test_reasons_are_returned_by_the_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The process is replaced: a real one would import torch and transformers."""

        def sent(_: str, probe: str, *asked: Any, within_s: float) -> Any:
            assert probe == f"{serve.__module__}:{serve.__name__}"
            ours, theirs = Pipe()
            serve(*asked, theirs)
            return ours.recv()

        monkeypatch.setattr(checkpoints, "ask_child", sent)
        with pytest.raises(CannotRun, match="not every layer calls attention once"):
            describe_in_child(stated("diffllama"), {})

    def test_a_process_that_dies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpoints, "PROBE", "os:_exit_of_nothing")
        with pytest.raises(CannotRun, match="two processes that looked at it ended"):
            describe_in_child({}, {})

    def test_one_that_takes_too_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpoints, "WITHIN_S", 0.0)
        with pytest.raises(Unavailable, match="has not answered for 0 s; run the same command again"):
            describe_in_child({}, {})


def test_our_families_never_go_through_transformers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")

    def nobody(*_: object) -> Any:
        raise AssertionError("a family of ours was described")

    assert open_checkpoint(tmp_path, nobody).modelling == "batchinfer"


def test_the_engine_takes_either() -> None:
    """The engine gets a source for each kind of model."""
    folder = kept_folder()
    make_foreign(folder, "phi")
    source = checkpoint_source(folder)
    assert source.computed_by(source.choose_ops(PLACE)) == ("transformers", "transformers")
    assert not source.can_be_captured


def test_costs_count_active_experts() -> None:
    """Two of four experts per layer, and the parts that all tokens use."""
    checkpoint = make("olmoe").checkpoint
    spec = checkpoint.spec
    hidden, inner, layers = 48, 64, 3
    attention = hidden * 12 * (4 + 2 + 2) + 4 * 12 * hidden
    experts = 2 * 3 * hidden * inner + hidden * 4  # chosen ones, and the router
    assert spec.active == pytest.approx(layers * (attention + experts), rel=0.01)
    assert spec.head == 260 * hidden
    cost = checkpoint.cost(4, 4)
    assert cost.kv_bytes(1) == 4 * layers * 2 * 2 * 12
    assert cost.active_parameters == spec.active


def test_the_rows_of_the_check_do_not_use_the_global_seed(phi: Foreign) -> None:
    """The check's rows do not use torch's or Python's global generator."""
    states = torch.get_rng_state(), random.getstate()
    phi.loaded()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
