"""Tests layers that read the K and V of an earlier layer, and layers without attention.

Greedy tokens and logits in float32 equal a plain decoder's for any split and any sharing; caches are checked,
too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchinfer.core.errors import JobFileError, Unavailable
from batchinfer.engine.config import EngineConfig, LoadConfig
from batchinfer.engine.kv.cache_layout import cache_layout
from batchinfer.engine.load.build import load_model
from batchinfer.engine.tensors.device_memory import allocate_caches, block_bytes
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.decoder.block import Block
from batchinfer.models.ops.attention import LayerCache
from batchinfer.models.ops.choose import choose_ops
from batchinfer.models.ops.cpu_layer import CompiledLayer
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.sources import ModelSource
from batchinfer.models.spec.model_cost import model_cost
from batchinfer.models.spec.spec import CacheSpec
from batchinfer_kernels.cost import ModelCost, StepShape
from batchinfer_kernels.cpu.compilers import NoCompiler
from batchinfer_kernels.paged_attention import CODES
from tests.batchinfer.engine.interpreted_gpu import DEVICE, triton_ops
from tests.batchinfer.engine.small_engine import (
    TRITON,
    Limits,
    Noted,
    Place,
    Ran,
    RecordingSampler,
    cpu_ops,
    drain,
    greedy,
    make_engine,
    make_runner,
)
from tests.batchinfer.engine.teacher_forced import Row, forced_logits
from tests.batchinfer.engine.test_engine import LENGTHS, OUTPUT, SETTINGS, check_steps, prompts, run_engine
from tests.batchinfer.made_up import MadeUp, PlainDecoder, register
from tests.checkpoints import kept_folder
from tests.kernels.gpu.pairs import each_first

NORMED = {"qk_norm": True, "attention_bias": True}
MODELS = {
    "shared": MadeUp((0, 1, 1, 0, 1)),
    "shared-windows": MadeUp((0, 1, 2, 0, 1, 2), (24, None, 24, 24, None, 24), NORMED),
    "none": MadeUp((0, None, 2, None)),
    "both": MadeUp((None, 1, 2, None, 1, 2), (None, 24, None, None, 24, None), NORMED),
}
COMPARED = list(MODELS)
CODED = ("int8", "fp8")
MODELS["whole"] = MadeUp((0, 1, 2, 3))
# Quantised caches, of layers that share K and V or have a window
MODELS |= {dtype: MadeUp((0, 1, 1, 0), (None, 24, 24, None), {"cache_dtype": dtype}) for dtype in CODED}
# Few blocks, so windows must free theirs
SCARCE = {"shared-windows": {"blocks": 75}, "both": {"blocks": 58}}
ALWAYS = (SETTINGS[1], SETTINGS[2], SETTINGS[5])  # mixed and shared; private pieces; preempted


@pytest.fixture(scope="module", autouse=True)
def larch() -> Iterator[None]:
    """Register the model family during these tests."""
    with pytest.MonkeyPatch.context() as patch:
        register(patch)
        yield


@cache
def folder(name: str) -> Path:
    made = kept_folder()
    MODELS[name].write(made, seed=5)
    return made


@cache
def plain(name: str) -> PlainDecoder:
    return PlainDecoder(folder(name))


@cache
def logits_of(name: str, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Tensor:
    """Return the plain decoder's logits before each token of an answer."""
    return plain(name).logits([*prompt, *answer[:-1]])[len(prompt) - 1 :]


def alike() -> list[list[int]]:
    """Return the prompts with a common prefix."""
    return prompts()[len(LENGTHS) :]


def short() -> list[list[int]]:
    """Return the prompts that a plain decoder reads quickly."""
    return [prompt for prompt in prompts() if len(prompt) < 130]


def check(name: str, ran: Ran, seen: dict[Place, Tensor], rows: list[list[int]], most: int = OUTPUT) -> None:
    """Check that every answer is the plain decoder's greedy answer, with its logits."""
    end = MODELS[name].config["eos_token_id"]
    for row, prompt in enumerate(rows):
        tokens = ran.tokens(row)
        assert len(tokens) == most or (0 < len(tokens) < most and tokens[-1] == end)
        assert end not in tokens[:-1]
        logits = logits_of(name, tuple(prompt), tuple(tokens))
        assert tokens == logits.argmax(-1).tolist()
        got = torch.stack([seen[row, at] for at in range(len(tokens))]).cpu()
        torch.testing.assert_close(got, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("limits", "name"), each_first(ALWAYS, COMPARED), ids=str)
def test_tokens_and_logits_equal_a_plain_decoder(name: str, limits: Limits) -> None:
    rows = short()
    if limits.scarce:
        limits, rows = replace(limits, **SCARCE.get(name, {})), prompts()
    ran, seen = run_engine(folder(name), limits, greedy(rows, OUTPUT))
    check(name, ran, seen, rows)
    check_steps(ran, limits)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["shared-windows", "both"])
def test_torchs_operators_do_the_same(name: str) -> None:
    ran, seen = run_engine(folder(name), SETTINGS[1], greedy(short(), OUTPUT), ops=TorchOps())
    check(name, ran, seen, short())


@TRITON
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy
@pytest.mark.parametrize("name", [pytest.param("shared-windows", marks=pytest.mark.slow), "both"])
@pytest.mark.parametrize(
    "limits", [Limits(budget=32), pytest.param(Limits(blocks=60, scarce=True), marks=pytest.mark.slow)]
)
def test_tritons_operators_do_the_same(name: str, limits: Limits) -> None:
    model = inspect_checkpoint(folder(name))
    sampler = RecordingSampler(frozenset(model.spec.eos_token_ids))
    runner = Noted(replace(make_runner(model, triton_ops(model), limits, DEVICE), sampler=sampler))
    chosen, most = (prompts(), 3) if limits.scarce else (alike(), 2)
    rows = [prompt for prompt in chosen if len(prompt) in (17, 33)]
    ran = drain(make_engine(runner, limits, sampler.eos_token_ids), greedy(rows, most))
    check(name, ran, sampler.seen, rows, most)
    check_steps(ran, limits)


def held(caches: list[LayerCache]) -> int:
    """Return the bytes of the caches' tensors, each counted once."""
    kept = [tensor for cache in caches for tensor in (cache.k, cache.v, cache.k_scale, cache.v_scale)]
    tensors = [tensor for tensor in kept if tensor is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize(
    ("name", "keeping"), [("shared", 2), ("shared-windows", 3), ("none", 2), ("both", 2)]
)
def test_a_cache_holds_the_layers_that_keep_something(name: str, keeping: int) -> None:
    ops, caches, blocks = TorchOps(), MODELS[name].spec.caches, 7
    for longest in (16, 300):  # shorter than the windows, and longer
        layout = cache_layout(caches, 8, longest)
        made = allocate_caches(ops, caches, layout, blocks, torch.float32, "cpu")
        assert len(made) == sum(cache is not None for cache in caches)
        a_layer = blocks * 8 * 2 * 2 * 16 * 4  # K and V of two heads of 16 float32 values
        assert held(made) == blocks * block_bytes(ops, caches, layout, 4) == layout.depth * a_layer
        assert sorted(layer for group in layout.groups for layer in group.layers) == [
            layer for layer, read in enumerate(MODELS[name].reads) if read == layer
        ]
    assert cache_layout(caches, 8, 16).depth == keeping


def engine_config(name: str, **more: Any) -> EngineConfig:
    sizes = {"max_model_len": 320, "longest": 300, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return EngineConfig(LoadConfig(folder(name), "float32", "cpu", threads=1), block_size=16, **sizes, **more)


def test_a_built_engine_has_memory_for_as_many_more_rows() -> None:
    """Two of four layers have a cache: equal memory has room for twice the blocks."""
    whole, half = (load_model(engine_config(name, kv_memory=2**20)).info for name in ("whole", "none"))
    assert half.blocks == 2 * whole.blocks


def test_features_without_a_fused_layer_run_as_single_operators() -> None:
    model = inspect_checkpoint(folder("both"))
    runner = make_runner(model, cpu_ops(model), Limits())
    kinds = [type(layer) for layer in runner.model._layers]  # type: ignore[attr-defined]
    assert kinds == [Block, CompiledLayer, CompiledLayer, Block, Block, Block]


def step_cost(cost: ModelCost, name: str, tokens: int) -> tuple[int, int]:
    """Return (FLOPs, bytes) of an operator in a step of single queries over contexts of 100."""
    seen = tokens * cost.seen(100)
    found = cost.step(StepShape(tokens, tokens, seen, seen))[name]
    return found.flops, found.bytes


def test_costs_count_reads_and_cached_bytes() -> None:
    """A layer that reads another layer's K and V reads the usual amount and writes none."""
    own, reading, bare = (
        model_cost(MadeUp(reads).spec, 2) for reads in ((0, 1, 2), (0, 0, 0), (0, None, None))
    )
    a_token = 2 * 2 * 16 * 2  # K and V of two heads of 16 values of 2 bytes
    assert [cost.kv_bytes(1) for cost in (own, reading, bare)] == [3 * a_token, a_token, a_token]
    assert step_cost(own, "attention", 5) == step_cost(reading, "attention", 5)
    assert step_cost(own, "attention", 5) == tuple(3 * part for part in step_cost(bare, "attention", 5))
    assert (own.layers, reading.layers, bare.layers) == (3, 3, 1)
    written = step_cost(own, "rope_store", 5)[1] - step_cost(reading, "rope_store", 5)[1]
    # k and v are read and written, and slots are read
    assert written == 2 * 5 * (2 * a_token + 8)
    projections = 2 * 48 * 2 * 2 * 16
    assert own.parameters - reading.parameters == projections
    attention = 48 * (4 * 16 * 2 + 2 * 2 * 16)
    assert own.parameters - bare.parameters == 2 * attention
    assert bare.kv_bytes(100) == 100 * a_token
    windows = model_cost(MODELS["both"].spec, 2)
    assert [windows.kv_bytes(tokens) for tokens in (10, 300)] == [2 * 10 * a_token, (24 + 300) * a_token]


@pytest.mark.parametrize(
    ("reads", "windows", "message"),
    [
        ((1, 1), (), "layer 0 reads the K and V of layer 1, which is no earlier layer with K and V"),
        ((0, 0, 1), (), "layer 2 reads the K and V of layer 1, which is no earlier layer with K and V"),
        ((0, None, 1), (), "layer 2 reads the K and V of layer 1, which is no earlier layer with K and V"),
        (
            (0, 0),
            (24, None),
            "layer 1 reads the K and V of layer 0, whose heads, window or dtype differ",
        ),
        ((None, None), (), "no layer keeps K and V"),
    ],
)
def test_unreadable_layer_configurations_are_refused(reads: Any, windows: Any, message: str) -> None:
    with pytest.raises(JobFileError, match=f"config.json: {message}"):
        _ = MadeUp(reads, windows).spec
    caches = [
        None if read is None else CacheSpec(2, 16, window, shared=None if read == layer else read)
        for layer, (read, window) in enumerate(zip(reads, windows or (None,) * len(reads), strict=True))
    ]
    with pytest.raises(ValueError, match=message):
        cache_layout(caches, 16, 300)


def forced(name: str, ops: Ops, device: str, rows: list[Row]) -> dict[Place, Tensor]:
    limits = Limits(budget=32)
    runner = make_runner(inspect_checkpoint(folder(name)), ops, limits, device)
    found, ran = forced_logits(runner, limits, rows)
    check_steps(ran, limits)
    return found


def coded_ops(dtype: str, device: str) -> Ops:
    model = inspect_checkpoint(folder(dtype))
    return cpu_ops(model, codes=True) if device == "cpu" else triton_ops(model)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("dtype", "device"),
    [
        ("int8", "cpu"),
        pytest.param("int8", "gpu", marks=TRITON),
        pytest.param("fp8", "gpu", marks=[TRITON, pytest.mark.slow]),
    ],
)
def test_a_quantised_cache_has_the_logits_of_a_decoder_that_rounds_k_and_v(dtype: str, device: str) -> None:
    """Another order of sums may round a value to its neighbour. Without quantisation, the difference is
    larger."""
    rows = [Row(prompt, [7, 11, 13]) for prompt in alike() if len(prompt) in (17, 33)]
    got = forced(dtype, coded_ops(dtype, device), "cpu" if device == "cpu" else DEVICE, rows)
    wanted, exact = (
        [plain.logits(row.prompt + row.answer)[len(row.prompt) - 1 : -1] for row in rows]
        for plain in (PlainDecoder(folder(dtype)), PlainDecoder(folder(dtype), coded=False))
    )
    off = sorted(float((got[n, at] - wanted[n][at]).abs().max()) for n, at in got)
    assert len(off) == 3 * len(rows)
    without = min(float((exact[n] - wanted[n]).abs().max()) for n in range(len(rows)))
    assert off[len(off) // 2] < 1e-4
    assert off[-1] < without / 3


@pytest.mark.parametrize(
    ("dtype", "device"),
    [
        ("int8", "cpu"),
        pytest.param("int8", "gpu", marks=TRITON),
        pytest.param("fp8", "gpu", marks=TRITON),
    ],
)
def test_quantised_cache_values_count_as_a_byte(dtype: Any, device: str) -> None:
    """A value takes a byte, and each head of a token a scale of four bytes. Heads and blocks are whole
    vectors."""
    ops, spec = coded_ops(dtype, device), MODELS[dtype].spec
    layout = cache_layout(spec.caches, 16, 300)
    made = allocate_caches(ops, spec.caches, layout, 5, torch.bfloat16, "cpu")
    assert {cache.k.dtype for cache in made} == {CODES[dtype]}
    wanted = 5 * layout.depth * 16 * 2 * 2 * (16 + 4)
    assert held(made) == 5 * block_bytes(ops, spec.caches, layout, 2) == wanted
    assert not ops.supports_cache(CacheSpec(1, 8, latent=True, dtype="int8"))
    assert ops.supports_cache(CacheSpec(1, 16, dtype="fp8")) == (device == "gpu")
    plain = MadeUp((0, 1, 1, 0), (None, 24, 24, None)).spec
    cost, values = model_cost(spec, 2), model_cost(plain, 2)
    assert cost.kv_bytes(300) * 32 == values.kv_bytes(300) * 20
    read = step_cost(values, "attention", 5)[1] - step_cost(cost, "attention", 5)[1]
    # a byte less per value of K and V, and a scale of 4 bytes per head
    assert read == 5 * cost.seen(100) * 2 * 2 * (16 - 4)


def test_operators_without_quantised_caches_refuse_them_before_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ModelSource, "load", lambda *_: pytest.fail("it loads"))
    with pytest.raises(Unavailable, match="cpu operators do not support a KV cache in fp8") as refused:
        load_model(engine_config("fp8"))
    assert refused.value.exit_code == 69
    with pytest.raises(ValueError, match="do not support a KV cache in int8"):
        cpu_ops(inspect_checkpoint(folder("int8"))).allocate_cache(
            CacheSpec(2, 16, dtype="int8"), 3, 16, torch.float32, "cpu"
        )


def test_the_error_of_a_cpu_without_quantised_caches_names_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message names the CPU's operators and the remedy, not torch's operators, which the job did not
    select."""
    uncovered = r"model\.kv_cache_dtype: int8 needs the compiled CPU operators: they do not cover .* 512"
    with pytest.raises(Unavailable, match=uncovered):
        choose_ops(torch.device("cpu"), torch.float32, group=1, head_dim=512, codes=True)

    def refuse(**_: object) -> None:
        raise NoCompiler("no C compiler (cc, gcc or clang) is installed")

    monkeypatch.setattr("batchinfer.models.ops.choose.CompiledOperators", refuse)
    with pytest.raises(Unavailable, match=r"int8 needs .*no C compiler.* install one .*, or take it out"):
        load_model(engine_config("int8"))
