"""Compares the whole engine on Triton operators with CPU operators, on the GPU if there is one, otherwise in
the interpreter."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, cast

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

import torch
from torch import Tensor

from batchinfer.core.request import Request
from batchinfer.engine.config import EngineConfig, LoadConfig
from batchinfer.engine.graphs import decode_graphs
from batchinfer.engine.graphs.graph_capture import GraphRecorder
from batchinfer.engine.kv.cache_layout import cache_layout
from batchinfer.engine.load import build
from batchinfer.engine.load.device_fit import FittedRunner
from batchinfer.engine.load.dummy_steps import sizes_between
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.tensors.batch import HostBatch
from batchinfer.engine.tensors.graph_sizes import batch_sizes
from batchinfer.input.constraints.constrained import grammar_constraints
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.prompts import contest, flash_attention, prefill
from batchinfer.models.ops.prompts.flash_attention import FlashAttentionPrefill
from batchinfer.models.ops.prompts.flashinfer import FlashInferPrefill
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.ops.triton_ops import TritonOps
from batchinfer_kernels.arithmetic import Quantization
from batchinfer_kernels.gpu import attention_plan, matmul_tiles, step_arrays
from batchinfer_kernels.gpu.prefill_attention import prefill_attention
from tests.batchinfer.engine import guided_rows
from tests.batchinfer.engine.coded_references import CodedOps, ValueOps, forced
from tests.batchinfer.engine.interpreted_gpu import DEVICE, stand_in, triton_ops
from tests.batchinfer.engine.small_engine import (
    MAX_LEN,
    MIXED,
    Limits,
    Noted,
    Place,
    Ran,
    RecordingSampler,
    checkpoint,
    cpu_ops,
    drain,
    folder,
    greedy,
    looking_ahead,
    make_engine,
    make_runner,
    quantized,
)
from tests.batchinfer.engine.teacher_forced import different, farthest
from tests.batchinfer.models.ops.prompts import flash_attention_stand_in, flashinfer_stand_in
from tests.checkpoints import kept_folder
from tests.examples import first_of
from tests.foreign_models import EOS as FOREIGN_EOS
from tests.foreign_models import make_foreign
from tests.kernels.gpu.float8_sums import float8_rounding
from tests.kernels.gpu.specialisations import recorded

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy

VARIANTS = {
    "llama": ("llama", {}),
    "llama-one-layer": ("llama", {"num_hidden_layers": 1}),
    "llama-window": ("mistral", {"sliding_window": 24}),
    "qwen2-biased": ("qwen2", {"tied": True}),
    "qwen2-mixed-windows": ("qwen2", MIXED),
    "qwen3-normed": ("qwen3", {"rope": "yarn", "num_key_value_heads": 1}),
    "qwen2-moe": ("qwen2_moe", {}),
    "olmo2": ("olmo2", {"num_key_value_heads": 1}),
    "granite-biased": ("granite", {"attention_bias": True}),
    "phi3-partial": ("phi3", {"rope": "partial-0.5"}),
    "gemma2": ("gemma2", {"sliding_window": 24}),
    "gemma3": ("gemma3_text", {"sliding_window": 24}),
    "cohere-normed": ("cohere", {"tied": True}),
    "cohere2": ("cohere2", {"sliding_window": 24}),
    "gpt2": ("gpt2", {}),
    "gpt-neox": ("gpt_neox", {}),
    "gpt-oss": ("gpt_oss", {"sliding_window": 24}),
    "deepseek-v2": ("deepseek_v2", {}),
    "deepseek-v3": ("deepseek_v3", {}),
}
ALWAYS = ("qwen3-normed", "gemma2", "gpt-oss")
SHARED = 40
OUTPUT = 3
SEGMENT = 32  # keys: a tile of float32
SETTINGS = {
    "chunked": Limits(budget=32),
    "whole": Limits(budget=4096, caching=False),
    "preempted": Limits(budget=64, blocks=16, scarce=True),  # 16: preempts in every model
}


def prompts(every: int = 1) -> list[list[int]]:
    """Return short and long prompts, the second half of them with a shared prefix.

    Args:
        every: keep every n-th prompt.
    """
    rng = random.Random(11)
    shared = [rng.randrange(250) for _ in range(SHARED)]
    own = [[rng.randrange(250) for _ in range(n)] for n in (1, 7, 17, 33)]
    return (own + [shared + row[:7] for row in own])[::every]


def model_of(variant: str) -> Checkpoint:
    """Return the checkpoint of a variant; "llama+int8" has quantised weights."""
    name, _, quantization = variant.partition("+")
    family, options = VARIANTS[name]
    return quantized(checkpoint(family, **options), cast(Quantization, quantization or "none"))


def ran(variant: str, limits: Limits, ops: Ops, device: str, rows: list[list[int]]) -> Ran:
    model = model_of(variant)
    engine = make_engine(make_runner(model, ops, limits, device), limits, frozenset(model.spec.eos_token_ids))
    return drain(engine, greedy(rows, OUTPUT))


def on_the_cpu(variant: str, limits: Limits, rows: list[list[int]]) -> Ran:
    return ran(variant, limits, cpu_ops(model_of(variant)), "cpu", rows)


def cases() -> Iterator[Any]:
    for variant, setting in product(VARIANTS, SETTINGS):
        if variant == "llama-one-layer":  # for tests of the engine, not of layers
            continue
        thin = setting == "chunked" and variant in ALWAYS
        yield pytest.param(variant, setting, marks=[] if thin else [pytest.mark.slow])


@pytest.mark.parametrize(("variant", "setting"), list(cases()))
def test_tokens_equal_the_cpus(monkeypatch, variant, setting):
    limits, caches = SETTINGS[setting], model_of(variant).spec.caches
    layout = cache_layout(caches, limits.block_size, MAX_LEN)
    if limits.scarce and layout.sizes.windowed:
        # of fewer layers; rows are preempted all the same, see `Preempting`
        limits = replace(limits, blocks=60)
    # half of the rows suffice for a family's layers; preemption needs all of them
    rows = prompts(2 if setting == "chunked" and variant != "llama" else 1)
    wanted = on_the_cpu(variant, limits, rows)
    levels = []
    find = attention_plan.find_shared

    def watched(*arguments):
        levels.append(find(*arguments))
        return levels[-1]

    # these prefixes are too short to be shared otherwise
    monkeypatch.setattr(attention_plan, "LEAST_SHARED_KEYS", 32)
    monkeypatch.setattr(attention_plan, "LEAST_SHARERS", 2)
    monkeypatch.setattr(attention_plan, "find_shared", watched)
    got = ran(variant, limits, triton_ops(model_of(variant)), DEVICE, rows)
    assert got.answers == wanted.answers
    assert len({tuple(tokens) for tokens, _ in got.answers.values()}) >= len(rows) - 1
    together = layout.full_group is not None and not caches[0].latent
    assert any(levels) == (limits.caching and together), "rows with a shared prefix attend together"
    assert (got.total("preemptions") > 0) == limits.scarce
    if limits.budget == 32:
        assert any(s.prefill_tokens and s.decode_tokens for s in got.steps), "no step mixed both"


@pytest.mark.parametrize("setting", first_of(["chunked", "whole"], 1))
def test_prompts_are_decompressed_if_the_cache_has_latents(monkeypatch, setting):
    """With these few tokens, decompression would not be faster."""
    from batchinfer.models.ops import gpu_latents

    lens: list[int] = []
    attend = gpu_latents.DecompressedGroup.attend

    def watched(group, *arguments):
        lens.append(len(group.slots))
        attend(group, *arguments)

    monkeypatch.setattr(gpu_latents, "LEAST_TOKENS", 1)
    monkeypatch.setattr(gpu_latents.DecompressedGroup, "attend", watched)
    limits, rows = SETTINGS[setting], prompts(2)
    model = model_of("deepseek-v3")
    got = ran("deepseek-v3", limits, triton_ops(model), DEVICE, rows)
    assert got.answers == on_the_cpu("deepseek-v3", limits, rows).answers
    layers = len(model.spec.caches)
    read = layers * sum(map(len, rows))
    assert sum(lens) == read if setting == "whole" else 0 < sum(lens) < read


@pytest.mark.parametrize("quantization", first_of(["int8", "fp8"], 1))
def test_logits_of_quantised_weights_equal_their_reference(quantization):
    """Int8 sums are exact, fp8 sums nearly. Logits differ only by rounding in attention and norms, unless
    that rounds an activation to the next quantised value."""
    plain, model = model_of("llama"), model_of(f"llama+{quantization}")
    got, wanted = (forced(model, ops, DEVICE) for ops in (triton_ops(model), CodedOps()))
    off, unquantised = farthest(got, wanted), farthest(forced(plain, TorchOps(), DEVICE), wanted)
    half = len(off) // 2
    short = quantization == "fp8" and float8_rounding() > 0  # sums of few bits turn codes here and there
    assert off[half] < (unquantised[half] / 4 if short else 1e-5)
    assert off[-1] < unquantised[0] / 3, "further away than a model that is not quantised"
    if quantization == "fp8":
        return
    cpu = forced(model, cpu_ops(model), "cpu")
    assert farthest(got, cpu)[-1] < unquantised[0] / 3, "a CPU's int8 is another one"


def logits_of(
    ops: Ops, limits: Limits, requests: list[Request], variant: str = "llama"
) -> tuple[dict[Place, Tensor], Ran]:
    """Run an engine with look-ahead, as on a GPU, and return its logits and the run."""
    sampler = RecordingSampler(frozenset())
    runner = Noted(
        replace(looking_ahead(make_runner(model_of(variant), ops, limits, DEVICE)), sampler=sampler)
    )
    return sampler.seen, drain(make_engine(runner, limits, frozenset()), requests)


@pytest.fixture
def short_segments(monkeypatch):
    """Make segments short enough that these short sequences and narrow layers have several.

    Their sums must be added in one order.
    """
    for module in ("attention_plan", "attention_splits", "part_room"):
        monkeypatch.setattr(f"batchinfer_kernels.gpu.{module}.SEGMENT", SEGMENT)
    segmented = partial(prefill_attention, segment=SEGMENT)
    monkeypatch.setattr("batchinfer_kernels.gpu.paged_attention.prefill_attention", segmented)
    monkeypatch.setattr(matmul_tiles, "LEAST_SEGMENT", 16)
    monkeypatch.setattr(attention_plan, "LEAST_SHARED_KEYS", SEGMENT)
    monkeypatch.setattr(attention_plan, "LEAST_SHARERS", 2)


def apart(ops: Ops, requests: list[Request], variant: str = "llama") -> dict[Place, Tensor]:
    """Return the reference logits: each row alone, with an unchunked prompt and an empty cache."""
    alone = Limits(budget=4096, seqs=1, caching=False)
    return {place: row for one in requests for place, row in logits_of(ops, alone, [one], variant)[0].items()}


def same_bits(
    ops: Ops, limits: Limits, requests: list[Request], wanted: dict[Place, Tensor], variant: str = "llama"
) -> Ran:
    """Run the rows and check that their logits equal `wanted` bit by bit."""
    got, run = logits_of(ops, limits, requests, variant)
    assert different({place: got[place] for place in wanted}, wanted) == []
    return run


@pytest.mark.usefixtures("short_segments")
def test_a_row_has_the_same_bits_in_a_batch():
    """Prompts are chunked or cached, and steps have fewer or more rows than a tile."""
    variant, requests = "llama-one-layer", greedy(prompts(), 2, ignore_eos=True)
    ops = triton_ops(model_of(variant), deterministic=True)
    wanted = apart(ops, [requests[i] for i in (2, 7)], variant)
    run = same_bits(ops, Limits(budget=80), requests, wanted, variant)
    rows = [s.prefill_tokens + s.decode_tokens for s in run.steps]
    assert min(rows) < 64 < max(rows)
    assert run.total("cached_tokens") > 0


@pytest.mark.slow
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
def test_a_row_has_the_same_bits_however_the_work_is_split(quantization):
    """Chunks, cached prefixes, preemption and the reverse order."""
    variant = f"llama+{quantization}"
    ops = triton_ops(model_of(variant), deterministic=True)
    requests = greedy(prompts(), 4, ignore_eos=True)
    wanted = apart(ops, requests, variant)
    assert len(wanted) == 4 * len(prompts())
    for limits in SETTINGS.values():
        run = same_bits(ops, limits, requests[:: -1 if limits.scarce else 1], wanted, variant)
        assert (run.total("cached_tokens") > 0) == limits.caching
        assert (run.total("preemptions") > 0) == limits.scarce
    if quantization in ("fp8", "int4"):  # no CPU computes the one, and the other in int8
        return
    cpu = on_the_cpu(variant, SETTINGS["whole"], prompts())
    for row in range(len(requests)):
        assert [int(wanted[row, at].argmax()) for at in range(OUTPUT)] == cpu.tokens(row)[:OUTPUT]


def gpus_config(quantization: Quantization, deterministic: bool, rows: int = 5) -> EngineConfig:
    family, options = VARIANTS["llama-one-layer"]
    return EngineConfig(
        LoadConfig(
            folder(family, **options),
            "float32",
            "cuda",
            quantization=quantization,
            deterministic=deterministic,
        ),
        max_model_len=64,
        longest=60,
        max_num_seqs=rows,
        max_num_batched_tokens=32,
        block_size=8,
        kv_memory=2**19,
    )


def loaded_as_a_job_does(monkeypatch, config: EngineConfig, compiles: bool = False) -> LoadedModel:
    """Load a model with dummy steps, a scratch block, captured decode steps and look-ahead."""
    stand_in(monkeypatch.setattr, compiles, quick=not compiles)
    return build.load_model(config, constraints=grammar_constraints(guided_rows.tokenizer()))


@pytest.mark.usefixtures("short_segments")
def test_all_of_the_gpus_path(monkeypatch):
    monkeypatch.setattr(decode_graphs, "CAPTURE_AT_USE", 2)
    with recorded() as compiled:
        loaded = loaded_as_a_job_does(monkeypatch, gpus_config("none", False), compiles=True)
    info, runner = loaded.info, loaded.runner
    assert (info.ops, info.linear, info.blocks) == ("triton", "library", 51), (
        "five rows of 60 tokens, and a quarter more"
    )
    assert isinstance(runner, DeviceRunner)
    assert runner.graphs is not None
    before = runner.graphs.captured
    assert before == len(runner.graphs.sizes) + 1 == 5, "all sizes, and the largest with shared keys"
    assert runner.graphs.steps.drafted == 0, "nothing has drafts"
    assert runner.mixed is not None
    assert (runner.mixed.sizes, runner.mixed.captured) == ([32], 2), "before and after the layer's attention"
    rows = prompts(2)
    wanted = on_the_cpu("llama-one-layer", SETTINGS["chunked"], rows).answers
    copies = copies_of_steps(monkeypatch)
    with recorded() as later:
        for _ in range(2):  # a repeated size is captured, and is replayed in pieces before
            found = drain(loaded.engine(), greedy(rows, OUTPUT))
            assert found.answers == wanted
            assert "eager" not in {step.launch for step in found.steps}
    assert {step.launch for step in found.steps} == {"full_graph", "piecewise_graph"}
    assert max(copies) == 1, "whatever attention reads goes to the device together"
    assert runner.graphs.captured > before, "steps whose rows share keys need graphs of their own"
    assert {name for name, *_ in later} >= {"_decode_attention_kernel", "_prefix_attention_kernel"}
    assert later - compiled == set(), "a kernel is compiled while the job runs"


def copies_of_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives each step's number of copies to the device for attention.

    A capture makes none, as its tensors belong to another stream.
    """
    copies, capturing = [0], [False]
    staged, layers, capture = step_arrays.copy_to_pinned, DeviceRunner._layers, GraphRecorder.__call__

    def counted(values: Any, device: torch.device) -> Tensor:
        assert not capturing[0]
        copies[-1] += 1
        return staged(values, device)

    def captured(recorder: GraphRecorder, run: Callable[[], Tensor]) -> Any:
        capturing[0] = True
        made = capture(recorder, run)
        capturing[0] = False
        return made

    def begun(runner: DeviceRunner, host: HostBatch) -> Any:
        copies.append(0)
        return layers(runner, host)

    monkeypatch.setattr(step_arrays, "copy_to_pinned", counted)
    monkeypatch.setattr(GraphRecorder, "__call__", captured)
    monkeypatch.setattr(DeviceRunner, "_layers", begun)
    return copies


@pytest.mark.slow
@pytest.mark.usefixtures("short_segments")
def test_transformers_code_on_the_gpus_path(monkeypatch):
    """The model is measured, warmed up and run with look-ahead, and is never captured."""
    foreign = kept_folder()
    theirs = make_foreign(foreign, "phi")
    theirs.set_attn_implementation("eager")
    rows = [prompt for prompt in prompts() if len(prompt) < 40][:4]
    config = gpus_config("none", False)
    config = replace(config, load=replace(config.load, model=foreign))
    loaded = loaded_as_a_job_does(monkeypatch, config)
    assert (loaded.info.ops, loaded.info.linear) == ("transformers", "transformers")
    assert isinstance(loaded.runner, DeviceRunner)
    assert isinstance(loaded.runner.ops, TritonOps)
    assert loaded.runner.graphs is None
    got = drain(loaded.engine(), greedy(rows, 3))
    for (tokens, _), row in zip(got.answers.values(), rows, strict=True):
        ids = torch.tensor([row])
        asked = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": FOREIGN_EOS, "pad_token_id": 0}
        wanted = theirs.generate(ids, attention_mask=torch.ones_like(ids), **asked)
        assert tokens == wanted[0, len(row) :].tolist()


@pytest.mark.usefixtures("short_segments")
def test_all_of_the_gpus_path_in_int8_and_deterministic(monkeypatch):
    """Padding and graphs for longer contexts change no bit."""
    loaded = loaded_as_a_job_does(monkeypatch, gpus_config("int8", deterministic=True, rows=4))
    info, sampler, model = loaded.info, RecordingSampler(frozenset()), model_of("llama-one-layer")
    linear = model.spec.head.values + sum(layer.values for layer in model.spec.linears())
    assert info.weight_bytes == 4 * model.parameters - 3 * linear, "a byte for each value"
    assert (info.ops, info.linear, info.quantization, info.deterministic) == ("triton", "int8", "int8", True)
    requests = greedy(prompts(), 3, ignore_eos=True)[5:]
    noted: Any = Noted(replace(loaded.runner, sampler=sampler))
    run = drain(loaded.engine(runner=noted), requests)
    assert any(s.padded_tokens for s in run.steps), "three rows take the graph of four"
    sizes = [s.prefill_tokens + s.decode_tokens + s.padded_tokens for s in run.steps if s.prefill_tokens]
    assert set(sizes) == {32}
    ops = triton_ops(model_of("llama-one-layer+int8"), deterministic=True)
    wanted = apart(ops, requests[1:2], "llama-one-layer+int8")
    assert len(wanted) == 3
    assert different({place: sampler.seen[place] for place in wanted}, wanted) == []


@pytest.mark.parametrize("many", first_of([3, 1 << 20], 1))
def test_all_of_the_gpus_path_in_int4(monkeypatch, many):
    """Steps of few and of many rows, eager and replayed, with and without the shared panel."""
    monkeypatch.setattr("batchinfer.models.ops.gpu_linear.least_panel_rows", lambda *_, **__: many)
    loaded = loaded_as_a_job_does(monkeypatch, gpus_config("int4", deterministic=False, rows=4))
    assert (loaded.info.ops, loaded.info.linear, loaded.info.quantization) == ("triton", "int4", "int4")
    variant, rows = "llama-one-layer+int4", prompts()[5:]
    run = drain(loaded.engine(), greedy(rows, OUTPUT))
    assert any(s.padded_tokens for s in run.steps), "three rows take the graph of four"
    assert run.answers == ran(variant, SETTINGS["chunked"], ValueOps(), DEVICE, rows).answers


@pytest.mark.sample(2)
@pytest.mark.parametrize("processors", [78, 132])  # of an H20 and an H100
@pytest.mark.parametrize("kind", ["int8", "half"])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)])
def test_the_warm_up_meets_all_specialisations_of_products(kind, outputs, inputs, processors):
    """The layers of an 8B model: tiles depend on the number of rows, and kernels on numbers that are 1 or
    multiples of 16."""

    def compiled(rows: int) -> tuple[object, ...]:
        split = matmul_tiles.choose_split(kind, outputs, rows, inputs, True, processors)
        numbers = (rows, split.segment // split.tiles.inputs, split.splits)
        return split.tiles, split.in_turn, split.splits > 1, *[(n == 1, n % 16 == 0) for n in numbers]

    largest, most = 8192, 256
    warmed = {compiled(rows) for rows in (*batch_sizes(most), *sizes_between(most, largest), largest)}
    assert {compiled(rows) for rows in range(1, largest + 1)} <= warmed


def _flashinfer(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Install a fake FlashInfer and return a counter of its runs."""
    module = flashinfer_stand_in.stand_in()
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(FlashInferPrefill, "version", lambda: "0.7.2")
    monkeypatch.setattr(FlashInferPrefill, "HEAD_DIMS", (triton_ops(model_of("llama")).shape.head_dim,))
    return lambda: sum(wrapper.runs for wrapper in module.BatchPrefillWithPagedKVCacheWrapper.made)


def _flash_attention(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    forward = flash_attention_stand_in.Forward()
    for name, module in flash_attention_stand_in.stand_in(forward).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flash_attention_stand_in, "HALVES", (torch.float32,))
    monkeypatch.setattr(flash_attention_stand_in, "HEAD_MULTIPLE", 4)
    monkeypatch.setattr(FlashAttentionPrefill, "HEAD_MULTIPLE", 4)
    monkeypatch.setattr(FlashAttentionPrefill, "version", lambda: "4.0.0b36")
    monkeypatch.setattr(flash_attention, "capability", lambda _: 9)
    return lambda: len(forward.calls)


@pytest.mark.slow
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(
    ("install", "extra"), [(_flashinfer, "flashinfer"), (_flash_attention, "flash-attn")]
)
def test_answers_are_the_same_if_a_library_computes_prefill_attention(monkeypatch, install, extra):
    """A fake module has the library's interface and is assumed to be faster."""
    count = install(monkeypatch)
    monkeypatch.setattr(prefill.PromptPrefill, "DTYPES", (torch.float32,))
    monkeypatch.setattr(contest, "MARGIN", float("inf"))
    loaded = loaded_as_a_job_does(monkeypatch, gpus_config("none", deterministic=False))
    assert loaded.info.ops == f"triton+{extra}"
    before = count()
    wanted = on_the_cpu("llama-one-layer", SETTINGS["chunked"], prompts()).answers
    assert drain(loaded.engine(), greedy(prompts(), OUTPUT)).answers == wanted
    assert count() > before
    assert build.load_model(gpus_config("none", deterministic=True)).info.ops == "triton"


SUMS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@pytest.fixture
def products_as_torch_has_them():
    """Restore torch's settings of products after the test, which an engine sets per process."""
    products = torch.backends.cuda.matmul
    before = [getattr(products, name) for name in SUMS]
    for name in SUMS:
        setattr(products, name, True)
    yield products
    for name, value in zip(SUMS, before, strict=True):
        setattr(products, name, value)


def test_an_engine_of_a_gpu_does_not_round_the_library_s_partial_sums(
    monkeypatch, products_as_torch_has_them
):
    monkeypatch.setattr(build, "fit_cache", lambda runner, limits, room, *_: FittedRunner(runner, limits, 1))
    gpus = gpus_config("none", False)
    build.load_model(replace(gpus, load=replace(gpus.load, device="cpu")))
    assert [getattr(products_as_torch_has_them, name) for name in SUMS] == [True, True]
    stand_in(monkeypatch.setattr)
    build.load_model(gpus)
    assert [getattr(products_as_torch_has_them, name) for name in SUMS] == [False, False]
