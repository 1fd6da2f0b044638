"""Tests that logits of a sharded model equal the logits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchinfer.core.errors import CannotSplit
from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.ops.cpu_ops import CpuOps
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import Head
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.parallel.group import Ranks
from batchinfer.models.parallel.shard import ModelShard, Portion
from batchinfer.models.parallel.shard_spec import shard_spec
from batchinfer.models.parallel.sharded_ops import SplitHead
from batchinfer.models.spec.spec import ModelSpec
from batchinfer_kernels.arithmetic import NO_TOKEN, Quantization
from batchinfer_kernels.cpu.compiled import CompiledOperators
from tests.batchinfer.models.paged import run_paged
from tests.batchinfer.models.parallel.parts import LOADING, load_part, run_sharded, run_stages
from tests.batchinfer.models.parallel.test_sliced_reading import store
from tests.batchinfer.models.test_calibrated_folder import calibrate
from tests.batchinfer.models.test_logits import prompts_of
from tests.checkpoints import FAMILIES, LATENT_FAMILIES, make_checkpoint
from tests.lora_adapters import make_adapter
from tests.thread_ranks import ThreadGroup, groups_of, of_ranks

ENDS = {
    "llama": ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
    "phi3": ("qkv_proj", "o_proj", "down_proj"),
    "gpt_neox": ("query_key_value", "dense_4h_to_h"),
    "deepseek_v2": ("q_b_proj", "o_proj", "kv_a_proj_with_mqa"),
}
LENGTHS = (1, 2, 17, 45)
MOE = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")
NORMS_ALL_HEADS = ("olmo2",)


def made(folder: Path, family: str, **options: Any) -> Checkpoint:
    make_checkpoint(folder, family, **options)
    return inspect_checkpoint(folder)


def alone(checkpoint: Checkpoint, ops: Ops, **how: Any) -> list[torch.Tensor]:
    load = {key: how.pop(key) for key in LOADING if key in how}
    decoder = load_part(checkpoint, ops, ModelShard(), **load)
    prompts = prompts_of(checkpoint.spec.vocab, LENGTHS)
    return run_paged(decoder, ops, prompts, dtype=load.get("dtype", torch.float32), **how)


def plain_ops(_: ModelSpec) -> Ops:
    return TorchOps()


def compiled(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Ops:
    attention = spec.attention
    return CpuOps(CompiledOperators(), attention.group, attention.cache.latent, dtype)


def check_close(found: list[list[torch.Tensor]], wanted: list[torch.Tensor]) -> None:
    for rank in found:
        for got, want in zip(rank, wanted, strict=True):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)


def check_equal(found: list[list[torch.Tensor]], wanted: list[torch.Tensor]) -> None:
    assert all(torch.equal(got, want) for rank in found for got, want in zip(rank, wanted, strict=True))


@pytest.mark.sample(10)
@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in NORMS_ALL_HEADS])
def test_tensor_ranks(tmp_path: Path, family: str, size: int) -> None:
    """4 ranks and 2 KV heads: two ranks share each head."""
    checkpoint = made(tmp_path, family, vocab=261)
    prompts = prompts_of(261, LENGTHS)
    found = run_sharded(checkpoint, plain_ops, size, prompts, chunk=20, block_size=8)
    check_close(found, alone(checkpoint, TorchOps(), chunk=20, block_size=8))


@pytest.mark.sample(4)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", MOE)
def test_expert_ranks(tmp_path: Path, family: str, exact: bool) -> None:
    """Both ranks have all weights except experts; sums in one process's order have its bits."""
    checkpoint = made(tmp_path, family)
    found = run_sharded(
        checkpoint, compiled, 2, prompts_of(260, LENGTHS), tensor=False, experts=True, exact=exact, chunk=20
    )
    wanted = alone(checkpoint, compiled(checkpoint.spec), chunk=20)
    (check_equal if exact else check_close)(found, wanted)


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", MOE)
def test_experts_with_tensor_ranks(tmp_path: Path, family: str) -> None:
    checkpoint = made(tmp_path, family)
    found = run_sharded(checkpoint, plain_ops, 4, prompts_of(260, LENGTHS), experts=True)
    check_close(found, alone(checkpoint, TorchOps()))


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_have_the_bits_of_one_model(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """The first and the last stage have a copy of tied tables each."""
    tied = dtype == torch.bfloat16
    checkpoint = made(tmp_path, family, tied=tied, num_hidden_layers=3)
    ops = compiled(checkpoint.spec, dtype)
    prompts = prompts_of(260, LENGTHS)
    found = run_stages(checkpoint, ops, [(0, 1), (1, 2), (2, 3)], prompts, chunk=20, dtype=dtype)
    check_equal([found], alone(checkpoint, ops, chunk=20, dtype=dtype))


def test_norms_of_all_heads_are_refused(tmp_path: Path) -> None:
    spec = made(tmp_path, "olmo2").spec
    with pytest.raises(CannotSplit, match="norms all query heads"):
        shard_spec(spec, ModelShard(Portion(0, 2)))


QUANTIZED: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def check_rounded(
    found: list[list[torch.Tensor]], wanted: list[torch.Tensor], exact: list[torch.Tensor]
) -> None:
    """Check that ranks are nearly as close to the float model as one process.

    Each rank rounds its activations, and may transform them in smaller blocks.
    """
    missed = torch.cat(wanted) - torch.cat(exact)
    for rank in found:
        least = 1e-5 * torch.cat(exact).norm()  # where codes are widened, nothing is rounded
        assert (torch.cat(rank) - torch.cat(exact)).norm() < 2 * missed.norm() + least


@pytest.mark.sample(4)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_tensor_ranks_of_rounded_weights(tmp_path: Path, family: str, quantization: Quantization) -> None:
    latent = {"moe_intermediate_size": 64, "v_head_dim": 16, "qk_nope_head_dim": 16}
    sizes = {"moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    checkpoint = made(tmp_path, family, **QUANTIZED, **(latent if family in LATENT_FAMILIES else sizes))
    prompts = prompts_of(260, LENGTHS)
    found = run_sharded(checkpoint, compiled, 2, prompts, quantization=quantization)
    whole = compiled(checkpoint.spec)
    wanted, exact = alone(checkpoint, whole, quantization=quantization), alone(checkpoint, whole)
    check_rounded(found, wanted, exact)


def outlying(file: Path) -> None:
    """Make two channels of norms outliers, which few experts read."""
    stored = load_file(file)
    for name, tensor in stored.items():
        if name.endswith("post_attention_layernorm.weight"):
            tensor[[3, 17]] *= 30
        if name.endswith("experts.gate_up_proj"):
            tensor[1:, [3, 17]] *= 1e-2
        if name.endswith(("w1.weight", "w3.weight")) and ".experts.0." not in name:
            tensor[:, [3, 17]] *= 1e-2
    save_file(stored, file, metadata={"format": "pt"})


@pytest.mark.sample(2)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_ranks_of_quantised_experts_give_the_same_bits(
    tmp_path: Path, family: str, quantization: Quantization
) -> None:
    """Each expert is rounded as a whole, and inputs of experts are smoothed equally on all ranks. One rank
    has the largest weights of a large channel."""
    make_checkpoint(tmp_path, family, **QUANTIZED)
    outlying(tmp_path / "model.safetensors")
    checkpoint = inspect_checkpoint(tmp_path)
    prompts, how = prompts_of(260, LENGTHS), {"quantization": quantization, "chunk": 20}
    found = run_sharded(checkpoint, compiled, 2, prompts, tensor=False, experts=True, exact=True, **how)
    check_equal(found, alone(checkpoint, compiled(checkpoint.spec), **how))


@pytest.mark.sample(3)
@pytest.mark.parametrize("form", ["mxfp4", "w8a8", "w4a16", "w4a16 with zeros", "awq"])
def test_ranks_of_stored_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Tensor ranks with quantised weights, and gpt-oss's experts by ranges, bit by bit."""
    packed, plain = store(tmp_path, form, monkeypatch)
    held = packed.for_quantization(packed.stored_quantization)
    prompts, how = prompts_of(260, LENGTHS), {"quantization": packed.stored_quantization}
    wanted = alone(held, compiled(held.spec), **how)
    check_rounded(run_sharded(held, compiled, 2, prompts, **how), wanted, alone(plain, compiled(plain.spec)))
    if form in ("mxfp4", "awq"):
        found = run_sharded(held, compiled, 2, prompts, tensor=False, experts=True, exact=True, **how)
        check_equal(found, wanted)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_ranks_of_calibrated_experts(tmp_path: Path, family: str) -> None:
    """Tensor ranks have columns of each expert in whole groups. Expert ranks have whole experts, with equal
    bits."""
    shared = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 128}
    make_checkpoint(tmp_path / "plain", family, **QUANTIZED, **(shared if family == "qwen2_moe" else {}))
    calibrate(tmp_path / "plain", tmp_path / "int4")
    held = inspect_checkpoint(tmp_path / "int4").for_quantization("int4")
    assert all(dict(layer.forms)["experts.down"].stored for layer in held.spec.layers)
    prompts, how = prompts_of(260, LENGTHS), {"quantization": "int4", "chunk": 20}
    wanted, plain = alone(held, compiled(held.spec), **how), inspect_checkpoint(tmp_path / "plain")
    check_rounded(run_sharded(held, compiled, 2, prompts, **how), wanted, alone(plain, compiled(plain.spec)))
    found = run_sharded(held, compiled, 2, prompts, tensor=False, experts=True, exact=True, **how)
    check_equal(found, wanted)


@pytest.mark.sample(2)
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_neox", "deepseek_v2"])
def test_adapters_are_sharded_like_the_layers_they_change(
    tmp_path: Path, family: str, quantization: Quantization
) -> None:
    """Tensor ranks and stages; each stage has the factors of its layers."""
    model = make_checkpoint(tmp_path / "base", family, num_hidden_layers=3)
    checkpoint = inspect_checkpoint(tmp_path / "base")
    ends = {"one": ENDS[family], "two": ["layers.1.mlp.down_proj", *ENDS[family][:1]]}
    folders = [
        (name, make_adapter(tmp_path / name, model, own, seed=seed, rank=4 - seed))
        for seed, (name, own) in enumerate(ends.items())
    ]
    prompts, how = prompts_of(260, LENGTHS), {"adapters": folders, "quantization": quantization}
    without = alone(checkpoint, compiled(checkpoint.spec), quantization=quantization)
    for adapter in (1, 2):
        wanted = alone(checkpoint, compiled(checkpoint.spec), adapter=adapter, **how)
        assert (wanted[-1] - without[-1]).norm() > 0.05 * wanted[-1].norm()
        found = run_sharded(checkpoint, compiled, 2, prompts, adapter=adapter, **how)
        if quantization == "none":
            check_close(found, wanted)
        else:
            floats = alone(checkpoint, compiled(checkpoint.spec), adapter=adapter, adapters=folders)
            check_rounded(found, wanted, floats)
        stages = run_stages(
            checkpoint, compiled(checkpoint.spec), [(0, 1), (1, 3)], prompts, adapter=adapter, **how
        )
        check_equal([stages], wanted)


def test_a_dora_is_merged_into_layers_that_are_all_there(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "base", "llama", num_hidden_layers=3)
    checkpoint, ops = inspect_checkpoint(tmp_path / "base"), TorchOps()
    folders = [("one", make_adapter(tmp_path / "one", model, ENDS["llama"], dora=True))]
    with pytest.raises(CannotSplit, match="DoRA"):
        load_part(checkpoint, ops, ModelShard(Portion(0, 2)), adapters=folders)
    found = run_stages(checkpoint, ops, [(0, 2), (2, 3)], prompts_of(260, LENGTHS), adapters=folders)
    check_equal([found], alone(checkpoint, ops, adapters=folders))


class StatedHead(Head):
    """A head that returns given logits for any input."""

    in_features, out_features = 1, 1

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._logits


def test_the_head_of_ranks_finds_the_argmax_of_all() -> None:
    """The lowest of equal maxima on two ranks; no token if a logit is NaN or infinite."""
    inf, nan = float("inf"), float("nan")
    stated = [[1, 5, 5, 0, 5], [3, 3, 3, 3, 3], [0, 1, 2, nan, 9], [inf, 1, 1, 1, 1], [1, 2, 3, 4, -inf]]
    rows = torch.tensor(stated, dtype=torch.float32)

    def work(group: ThreadGroup) -> list[int]:
        head = SplitHead(StatedHead(rows[:, slice(*Portion(group.rank, group.size).span(5))]), 5, group)
        assert torch.equal(head(rows).nan_to_num(-1.0), rows.nan_to_num(-1.0))
        group.sent = 0
        found: list[int] = head.argmax(rows).tolist()
        assert group.sent == 5 * 16  # a logit and a token of each row, not a row of logits
        return found

    for size in (2, 3, 5):
        assert of_ranks(groups_of(size), work) == [[1, 0, NO_TOKEN, NO_TOKEN, 3]] * size


@pytest.mark.parametrize("experts", [False, True])
def test_a_step_sends_two_sums_a_layer(tmp_path: Path, experts: bool) -> None:
    """It also sends the embedding and the requested logits."""
    checkpoint = made(tmp_path, "mixtral", num_hidden_layers=3, num_local_experts=4)
    sent: list[int] = []

    def work(group: ThreadGroup) -> None:
        portion = Portion(group.rank, 2)
        place, ops = ModelShard(portion, portion if experts else None), TorchOps()
        decoder = load_part(checkpoint, ops, place, Ranks(group, group))
        run_paged(decoder, ops, prompts_of(260, (7,)))
        sent.append(group.sent)

    of_ranks(groups_of(2), work)
    rows = 7 * 48 * 4
    assert sent == [rows + 3 * 2 * rows + 7 * 130 * 4] * 2
