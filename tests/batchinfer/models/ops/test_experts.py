"""Tests the experts of a layer on all kinds of operators against transformers' modules."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen2MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from batchinfer.models.checkpoint.dummy import DummyWeights
from batchinfer.models.decoder.block import pack_layer
from batchinfer.models.decoder.feed_forward import feed_forward
from batchinfer.models.ops.attention import AttentionInputs, RopeTable
from batchinfer.models.ops.cpu_ops import CpuOps
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import LayerParts
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.parallel.expert_placement import ExpertPlacement, Shares, split_into_ranges
from batchinfer.models.parallel.group import SINGLE_RANK, Ranks, SingleRankGroup
from batchinfer.models.spec.spec import ExpertsSpec, FeedForwardSpec, HeldExpert, LayerSpec, ModelSpec
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.experts import Choice
from batchinfer_kernels.routing import Routing
from tests.kernels.gpu.poison import poisoned
from tests.model_costs import llama_spec

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy
HIDDEN, INNER, SHARED = 24, 20, 36
KINDS = ("torch", "cpu", *(("triton", "deterministic") if importlib.util.find_spec("triton") else ()))


def ops_of(kind: str, dtype: torch.dtype = torch.float32) -> Ops:
    if kind == "torch":
        return TorchOps()
    if kind == "cpu":
        return CpuOps(CompiledOperators(), 2)
    from batchinfer.models.ops.triton_ops import TritonOps
    from batchinfer_kernels.gpu.attention_plan import AttentionShape

    shape = AttentionShape(dtype, 4, 2, 16, deterministic=kind == "deterministic")
    return TritonOps(shape)


def device_of(kind: str) -> str:
    if kind in ("torch", "cpu"):
        return "cpu"
    import triton

    return "cpu" if triton.knobs.runtime.interpret else "cuda"


def modules() -> Iterator[Any]:
    """Yield transformers' modules and our specs of them."""
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": 2, "num_attention_heads": 4}
    mixtral = MixtralConfig(**sizes, intermediate_size=INNER, num_local_experts=5)
    yield (
        "mixtral",
        MixtralSparseMoeBlock(mixtral),
        ExpertsSpec(Routing(5, 2, normalised=True), INNER, "silu"),
    )
    gelu = MixtralConfig(**sizes, intermediate_size=INNER, num_local_experts=1, hidden_act="gelu")
    gelu.num_experts_per_tok = 1
    yield "one", MixtralSparseMoeBlock(gelu), ExpertsSpec(Routing(1, 1, normalised=True), INNER, "gelu")
    inner = {"moe_intermediate_size": INNER}
    qwen = Qwen2MoeConfig(**sizes, **inner, num_experts=7, shared_expert_intermediate_size=SHARED)
    shared = FeedForwardSpec(SHARED, "silu")
    spec = ExpertsSpec(Routing(7, 2), INNER, "silu", shared=shared, shared_gated=True)
    yield "qwen2_moe", Qwen2MoeSparseMoeBlock(qwen), spec
    groups = {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5, "n_shared_experts": 2}
    rule = {"groups": 3, "chosen_groups": 2, "scale": 1.5}
    v2 = DeepseekV2Config(**sizes, **inner, **groups, n_routed_experts=9, topk_method="group_limited_greedy")
    shared = FeedForwardSpec(2 * INNER, "silu")
    yield "deepseek_v2", DeepseekV2Moe(v2), ExpertsSpec(Routing(9, 2, **rule), INNER, "silu", shared=shared)
    v3 = DeepseekV3Config(**sizes, **inner, **groups, n_routed_experts=9)
    routing = Routing(9, 2, "sigmoid", normalised=True, corrected=True, group_score="top_two", **rule)
    yield "deepseek_v3", DeepseekV3MoE(v3), ExpertsSpec(routing, INNER, "silu", shared=shared)
    del sizes["num_attention_heads"]
    gpt = GptOssConfig(**sizes, intermediate_size=INNER, num_local_experts=6)
    routing = Routing(6, 2, "softmax_of_chosen")
    spec = ExpertsSpec(routing, INNER, "clamped_swiglu", biased=True, router_biased=True)
    yield "gpt_oss", GptOssMLP(gpt), spec


CASES = {name: (module, spec) for name, module, spec in modules()}


def filled(module: nn.Module) -> dict[str, Tensor]:
    """Set random parameters; return the state with the names of the spec."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, values in (*module.named_parameters(), *module.named_buffers()):
            # GPT-OSS clamps what is large
            values.copy_(
                torch.randn(values.shape, generator=generator) * (1.6 if "gate_up_proj" in name else 0.4)
            )
    state = {name: values.detach() for name, values in module.state_dict().items()}
    if isinstance(module, GptOssMLP):
        return gpt_oss(state)
    renamed = {
        "experts.gate_up_proj": "experts.gate_up",
        "experts.down_proj": "experts.down",
        "gate.weight": "router",
        "gate.e_score_correction_bias": "correction",
        "shared_expert_gate.weight": "shared_gate",
    }
    found = {ours: state[theirs] for theirs, ours in renamed.items() if theirs in state}
    found |= {name: values.flatten(0, 1) for name, values in found.items() if values.dim() == 3}
    for start in ("shared_expert.", "shared_experts."):
        if f"{start}down_proj.weight" in state:
            gate, up = (state[f"{start}{name}_proj.weight"] for name in ("gate", "up"))
            found["shared.gate_up"] = torch.cat((gate, up))
            found["shared.down"] = state[f"{start}down_proj.weight"]
    return found


def gpt_oss(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return gpt-oss's expert weights, transposed, with interleaved rows of gate and up."""

    def apart(values: Tensor) -> Tensor:
        return torch.cat((values[:, ::2], values[:, 1::2]), 1).flatten(0, 1)

    return {
        "router": state["router.weight"],
        "router.bias": state["router.bias"],
        "experts.gate_up": apart(state["experts.gate_up_proj"].mT),
        "experts.gate_up.bias": apart(state["experts.gate_up_proj_bias"]),
        "experts.down": state["experts.down_proj"].mT.flatten(0, 1),
        "experts.down.bias": state["experts.down_proj_bias"].flatten(0, 1),
    }


def layer_of(spec: ExpertsSpec) -> tuple[LayerSpec, ModelSpec]:
    model = llama_spec(1, HIDDEN, INNER, 4, 2, 16, 30)
    layer = replace(model.layers[0], feed_forward=spec)
    return layer, replace(model, layers=(layer,))


def packed(
    name: str,
    kind: str,
    dtype: torch.dtype = torch.float32,
    quantization: Any = "none",
    held: tuple[HeldExpert, ...] | None = None,
    ranks: Ranks = SINGLE_RANK,
) -> tuple[Ops, LayerSpec, LayerParts]:
    """Return operators, a layer and its packed parts for a case.

    Args:
        held: the experts of this rank; None for all.
    """
    module, spec = CASES[name]
    layer, model = layer_of(spec)
    device, rope = device_of(kind), RopeTable(torch.ones(1, 8), torch.ones(1, 8))
    weights = {**DummyWeights(model, torch.float32, "cpu").layer(0), **filled(module)}
    placed = {
        key: values.to(device, torch.float32 if key in layer.vectors else dtype)
        for key, values in weights.items()
    }
    if held is not None:
        layer = replace(layer, feed_forward=replace(spec, held=held))
        of_experts = {name: placed[name] for name in placed if name.startswith("experts.")}
        split = {
            name: each.view(spec.routing.experts, -1, *each.shape[1:]) for name, each in of_experts.items()
        }
        placed |= {name: each[[one.number for one in held]].flatten(0, 1) for name, each in split.items()}
    ops = ops_of(kind, dtype)
    if quantization != "none":
        layer = layer.quantized(quantization)
    return ops, layer, pack_layer(ops, layer, placed, rope, ranks=ranks)


def inputs_of(tokens: int, device: str, padding: int | None = None) -> AttentionInputs:
    """Return inputs with slots from 100; nothing else is used."""
    slots, none = torch.arange(100, 100 + tokens, device=device), torch.zeros(0, device=device)
    return AttentionInputs(none, slots, none, [1] * tokens, [1] * tokens, padding_slot=padding)


def tokens_of(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.sample(7)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_experts_equal_transformers(name: str, kind: str) -> None:
    ops, layer, parts = packed(name, kind)
    module, device = CASES[name][0], device_of(kind)
    for count in (1, 23):
        x = tokens_of(count)
        got = feed_forward(ops, layer, parts, x.to(device), inputs_of(count, device))
        made = module(x[None])
        wanted = made[0] if isinstance(made, tuple) else made  # GPT-OSS gives its scores, too
        torch.testing.assert_close(got.cpu(), wanted[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_loads_count_the_tokens_of_each_expert_without_padding(kind: str) -> None:
    ops, layer, parts = packed("mixtral", kind)
    assert parts.experts is not None
    device, x = device_of(kind), tokens_of(9)
    chosen = ops.choose_experts(parts.linears["router"](x.to(device)), layer.feed_forward.routing).experts
    feed_forward(ops, layer, parts, x.to(device), inputs_of(9, device))
    wanted = torch.bincount(chosen.flatten(), minlength=5)
    assert torch.equal(parts.experts.loads, wanted)
    feed_forward(ops, layer, parts, x.to(device), inputs_of(9, device, padding=104))
    wanted += torch.bincount(chosen[[i for i in range(9) if i != 4]].flatten(), minlength=5)
    assert torch.equal(parts.experts.loads, wanted)


PLACED: Shares = ((0, 1, 4), (1, 2, 3), (1, 3, 5))  # two experts are on several ranks


@pytest.mark.sample(4)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_ranks_with_shares_of_the_experts_equal_one_rank(kind: str, quantization: str, exact: bool) -> None:
    """Results are bit-exact if sums follow the order of the choice. Placeholders of other ranks' rows are
    never read."""
    if kind == "torch" and quantization != "none":
        return
    dtype = torch.bfloat16 if quantization == "int4" and kind not in ("torch", "cpu") else torch.float32
    ops, layer, parts = packed("gpt_oss", kind, dtype, quantization)
    device = device_of(kind)
    x = tokens_of(23, dtype).to(device)
    choice = ops.choose_experts(parts.linears["router"](x), layer.feed_forward.routing)
    assert parts.experts is not None
    wanted = parts.experts(x, choice)

    for shares in (split_into_ranges(6, 3), PLACED):
        placement = ExpertPlacement((shares,))
        asked = [(kind, dtype, quantization, exact, placement.held(0, rank), x, choice) for rank in range(3)]
        with poisoned():
            given = [computed(*each, Given())[1] for each in asked]
            total = given[0] + given[1] + given[2]  # of bytes, if it is exact
            for each in asked:
                found, _ = computed(*each, Given(total))
                assert (found - wanted).norm() < 0.01 * wanted.norm()
                if exact and kind != "triton":  # whose tiles depend on how many experts there are
                    assert torch.equal(found, wanted)


@dataclass
class Given(SingleRankGroup):
    """A group of ranks that run in sequence, as the interpreter does not run in parallel.

    It records a rank's part of a sum; the second call returns the total.
    """

    total: Tensor | None = None
    x: Tensor | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        self.x = x.clone()
        return x if self.total is None else self.total.clone()


def computed(
    kind: str,
    dtype: torch.dtype,
    quantization: str,
    exact: bool,
    held: tuple[HeldExpert, ...],
    x: Tensor,
    choice: Choice,
    group: Given,
) -> tuple[Tensor, Tensor]:
    """Return the result of a rank with some of gpt-oss's experts, and its part of the sum."""
    ranks = Ranks(experts=group, exact=exact)
    _, _, parts = packed("gpt_oss", kind, dtype, quantization, held, ranks)
    assert parts.experts is not None
    found = parts.experts(x, choice)
    assert parts.experts.loads.sum() == choice.experts.numel()
    assert group.x is not None
    return found, group.x


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("kind", "dtype", "quantization"),
    [
        ("cpu", torch.float32, "none"),
        ("cpu", torch.bfloat16, "none"),
        ("cpu", torch.bfloat16, "int8"),
        *(
            [
                ("deterministic", torch.bfloat16, "none"),
                ("deterministic", torch.float32, "int8"),
                ("deterministic", torch.float32, "fp8"),
            ]
            * (len(KINDS) > 2)
        ),
    ],
)
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_a_token_does_not_depend_on_its_batch(
    name: str, kind: str, dtype: torch.dtype, quantization: Any
) -> None:
    ops, layer, parts = packed(name, kind, dtype, quantization)
    device = device_of(kind)
    x = tokens_of(40, dtype).to(device)
    whole = feed_forward(ops, layer, parts, x, inputs_of(40, device))
    for first, last in ((0, 1), (39, 40), (3, 12), (1, 36)):
        got = feed_forward(ops, layer, parts, x[first:last].contiguous(), inputs_of(last - first, device))
        assert torch.equal(got, whole[first:last])


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "quantization", "most"),
    [
        *((kind, "int8", 0.03) for kind in KINDS if kind != "torch"),
        *((kind, "fp8", 0.08) for kind in KINDS if kind not in ("torch", "cpu")),
    ],
)
@torch.inference_mode()
def test_quantised_experts_are_close_to_float_ones(kind: str, quantization: Any, most: float) -> None:
    """The router is not quantised: tokens keep their experts."""
    ops, layer, parts = packed("qwen2_moe", kind, quantization=quantization)
    device, x = device_of(kind), tokens_of(50)
    got = feed_forward(ops, layer, parts, x.to(device), inputs_of(50, device)).cpu()
    wanted = CASES["qwen2_moe"][0](x[None])[0]
    assert 0 < (got - wanted).norm() < most * wanted.norm()
