"""What a job's options become on a device: settings, refusals, and the context of every work key."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.errors import BatchInferError, CannotSplit, JobFileError, Unavailable
from batchinfer.job import Job, load_job
from batchinfer.machine import hardware as hardware_module
from batchinfer.machine.hardware import Gpu, Hardware, hardware_called, multiplies_fp8, usable_gpus
from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.spec.spec import AttentionSpec
from batchinfer.pipeline.workers.messages import EnginePlace, WorkerSpec
from batchinfer.pipeline.workers.places import worker_specs
from batchinfer.plan.setup import resolve as resolving
from batchinfer.plan.setup.resolve import Setting, resolve
from batchinfer_kernels.cost import Peaks
from batchinfer_kernels.tiles import Grant
from tests.checkpoints import make_checkpoint
from tests.packed_weights import make_fp8, make_mxfp4
from tests.published_formats import make_published

CPU = Hardware("Test CPU", "cpu", 2, None, {"bfloat16": 2e12, "int8": 4e12}, 3e10, "measured")
SETTING = Setting("cpu", "bfloat16", 512, CPU)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("checkpoint") / "m"
    make_checkpoint(folder, "llama")
    return inspect_checkpoint(folder)


def job_of(folder: Path, *settings: tuple[str, str]) -> Job:
    (folder / "m").mkdir(exist_ok=True)
    (folder / "job.yaml").write_text(
        "name: a\nmodel: {path: m}\ninput: {path: a.jsonl}\nprompt: {text: t}\noutput: {path: out}\n"
    )
    return load_job(folder / "job.yaml", settings)


# The contexts under which answers are stored, in numerics version 4. They only ever grow by lines: a digest that
# changes throws every such answer away. What shall do that raises NUMERICS_VERSION, which moves all of them at once.
CONTEXTS: list[tuple[dict[str, Any], str]] = [
    ({}, "030e37391d9b5e5c29566d575879117cb6d986466e74a8726483c0e1503f1d7d"),
    ({"dtype": "float32"}, "e7c3f455ac20328db745f80d8623a26fd2aff36a7ca0cf69022b6f09d0d9dd18"),
    (
        {"dtype": "float16", "device": "cuda"},
        "e6b1e939aeebc3d0b5a283e47e095fa5cc754cd6a489138547ed9d8ccb064080",
    ),
    ({"device": "cuda"}, "030e37391d9b5e5c29566d575879117cb6d986466e74a8726483c0e1503f1d7d"),
    ({"quantization": "int8"}, "7bf3a5a043adab47a5621952d24cd7c00c7185b5f52dec292ef67e38d96a3020"),
    ({"block_size": 16}, "030e37391d9b5e5c29566d575879117cb6d986466e74a8726483c0e1503f1d7d"),
    ({"deterministic": True}, "927ad270ac9d15238577fb00ca4edeb3583df9399aac56b16dd1a34173bff8d2"),
    (
        {"deterministic": True, "dtype": "float32"},
        "0b9d3714a33b53c2f76b192c058cd7de4ab84bc069954bc30543d8c484906adb",
    ),
    (
        {"deterministic": True, "quantization": "int8"},
        "46f019df76c009263d013d18555f776bb7a0aab9df0ff0eda65d592324f51c54",
    ),
    (
        {"deterministic": True, "block_size": 16},
        "667646bf3d07761e7bf42e395ae798733afe4ea8655f01f14926b9421b8b0185",
    ),
    (
        {"deterministic": True, "device": "cuda"},
        "eab0a2617212934523503fee32f126fd0c2b0b7e7440e8baec48b5f743ac8a56",
    ),
    ({"kv_cache": "int8"}, "c5b0ed4151c474b934996f6dde72a430a583d43ff99e3ba7c90d634814ed8713"),
    ({"max_model_len": 64}, "ace8b4efefad4cb0ad544ac821d15fa3ef9b11e7fd075f3bb1bf3fa6cc68a831"),
]


@pytest.mark.parametrize(("changes", "digest"), CONTEXTS)
def test_stored_answers_stay_valid(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], digest: str
) -> None:
    monkeypatch.setattr(resolving, "NUMERICS_VERSION", 4)
    assert replace(SETTING, **changes).context(checkpoint, "m", "t").hex() == digest


def test_an_option_at_its_default_is_absent_from_the_context(checkpoint: Checkpoint) -> None:
    """So one that is added later changes no key of a job that does not use it."""
    parts = {
        "model": "m", "tokenizer": "t", "dtype": "bfloat16", "max_model_len": 512, "eos": [257],
        "numerics": resolving.NUMERICS_VERSION,
    }  # fmt: skip
    wanted = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()
    assert SETTING.context(checkpoint, "m", "t") == wanted
    assert replace(SETTING, block_size=16).context(checkpoint, "m", "t") == wanted


def test_codes_multiplied_as_integers_have_deterministic_answers_of_their_own(checkpoint: Checkpoint) -> None:
    """Where they were widened first, the same job had other bits; in float32 they are widened still."""

    def widened(dtype: str) -> bytes:
        parts = {
            "model": "m", "tokenizer": "t", "dtype": dtype, "max_model_len": 512, "eos": [257],
            "numerics": resolving.NUMERICS_VERSION, "deterministic": True, "kv_cache_dtype": "int8",
        }  # fmt: skip
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()

    coded = replace(SETTING, kv_cache="int8", deterministic=True)
    assert replace(coded, dtype="float32").context(checkpoint, "m", "t") == widened("float32")
    assert coded.context(checkpoint, "m", "t") != widened("bfloat16")


def test_answers_that_were_checked_against_columns_are_apart(checkpoint: Checkpoint) -> None:
    digests = {SETTING.context(checkpoint, "m", "t", columns) for columns in range(3)}
    assert len(digests) == 3
    assert SETTING.context(checkpoint, "m", "t") in digests


def test_every_arithmetic_has_answers_of_its_own(checkpoint: Checkpoint) -> None:
    settings = [
        replace(SETTING, quantization=quantization, deterministic=deterministic, dtype=dtype, kv_cache=kept)
        for quantization in ("none", "int8", "fp8")
        for kept in ("auto", "int8", "fp8")
        for deterministic in (False, True)
        for dtype in ("bfloat16", "float32")
    ]
    assert len({one.context(checkpoint, "m", "t") for one in settings}) == len(settings)


DETERMINISTIC = {"deterministic": True}
# Options that decide in what order sums are added up, with their values
ORDERS: dict[str, tuple[Any, ...]] = {
    "tiles": (False, True),
    "arm": ("", "neon", "bfdot"),
    "block_size": ("auto", 8, 32),
    "device": ("cpu", "cuda"),
}


@pytest.mark.parametrize(
    ("option", "changes", "apart"),
    [
        *((option, changes, bool(changes)) for option in ORDERS for changes in (DETERMINISTIC, {})),
        ("tiles", DETERMINISTIC | {"quantization": "int8"}, True),  # attention is in tiles, too
        ("tiles", DETERMINISTIC | {"dtype": "float32"}, False),
        ("tiles", {"quantization": "int8"}, False),
    ],
)
def test_bits_of_another_order_of_sums_are_kept_apart_where_they_are_promised(
    checkpoint: Checkpoint, option: str, changes: dict[str, Any], apart: bool
) -> None:
    """Elsewhere another order is too little for another answer."""
    values = ORDERS[option]
    settings = [replace(SETTING, **changes, **{option: value}) for value in values]
    assert len({one.context(checkpoint, "m", "t") for one in settings}) == (len(values) if apart else 1)


@pytest.mark.parametrize("given", [False, True])
def test_tiles_are_used_where_they_are_granted(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    monkeypatch.setattr(resolving, "tile_grant", lambda: Grant(given))
    setting = resolve(job_of(tmp_path, ("engine.device", "cpu")), checkpoint)
    assert setting.tiles is given
    assert setting.load_config(job_of(tmp_path)).tiles is given
    assert not resolving.runs_in_tiles("cuda")


def test_the_options_reach_the_engine(tmp_path: Path, checkpoint: Checkpoint) -> None:
    job = job_of(tmp_path, ("model.quantization", "int8"), ("engine.deterministic", "true"))
    setting = resolve(job, checkpoint)
    config = setting.load_config(job)
    assert (setting.quantization, setting.deterministic) == ("int8", True)
    assert (config.quantization, config.deterministic) == ("int8", True)
    plain = resolve(job_of(tmp_path), checkpoint).load_config(job_of(tmp_path))
    assert (plain.quantization, plain.deterministic) == ("none", False)


@pytest.mark.parametrize(
    ("quantization", "deterministic", "text"),
    [
        ("none", False, "bfloat16"),
        ("int8", False, "bfloat16 with int8 weights"),
        ("none", True, "bfloat16, deterministic"),
    ],
)
def test_the_arithmetic_in_words(quantization: str, deterministic: bool, text: str) -> None:
    setting = replace(SETTING, quantization=quantization, deterministic=deterministic)  # type: ignore[arg-type]
    assert setting.arithmetic == text


def test_quantised_linear_layers_have_their_own_peak(checkpoint: Checkpoint) -> None:
    quantized = replace(SETTING, quantization="int8")
    assert SETTING.peaks == Peaks(2e12, 3e10)
    assert quantized.peaks == Peaks(2e12, 3e10, 4e12)
    assert SETTING.model_cost(checkpoint).weight_itemsize == 2
    assert quantized.model_cost(checkpoint).quantized
    unmeasured = replace(CPU, peak_flops={"bfloat16": 2e12})
    assert replace(quantized, hardware=unmeasured).peaks is None


def test_a_cache_of_codes_reaches_the_engine_of_a_gpu_and_what_is_forecast(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolving, "_device", lambda: "cuda")
    job = job_of(tmp_path, ("model.kv_cache_dtype", "fp8"), ("model.dtype", "bfloat16"))
    setting = resolve(job, checkpoint)
    assert setting.load_config(job).kv_cache == "fp8"
    assert setting.arithmetic == "bfloat16 with fp8 KV cache"
    plain = replace(setting, kv_cache="auto").model_cost(checkpoint)
    spec = checkpoint.spec.attention
    assert isinstance(spec, AttentionSpec)
    coded, whole = (cost.kv_bytes(100) for cost in (setting.model_cost(checkpoint), plain))
    assert coded * 2 * spec.head_dim == whole * (spec.head_dim + 4), "a byte a value, and a scale a head"


def test_a_cache_of_fp8_is_refused_on_a_cpu_and_codes_of_latents_anywhere(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolving, "_device", lambda: "cpu")
    with pytest.raises(JobFileError, match=r"kv_cache_dtype.*fp8: only a GPU can read and write it"):
        resolve(job_of(tmp_path, ("model.kv_cache_dtype", "fp8")), checkpoint)
    assert resolve(job_of(tmp_path, ("model.kv_cache_dtype", "int8")), checkpoint).kv_cache == "int8"
    with pytest.raises(JobFileError, match=r"kv_cache_dtype.*int8 is not available in float16 on a CPU"):
        resolve(job_of(tmp_path, ("model.kv_cache_dtype", "int8"), ("model.dtype", "float16")), checkpoint)
    make_checkpoint(tmp_path / "latent", "deepseek_v3")
    latent = inspect_checkpoint(tmp_path / "latent")
    assert latent.refusals(False, True, False) == []
    ((key, why),) = latent.refusals(False, True, True)
    assert key == "model.kv_cache_dtype"
    assert "keeps latents" in why


def test_fp8_has_a_peak_of_its_own_and_no_cpu(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, ("model.quantization", "fp8"), ("model.dtype", "float16"))
    setting = resolve(job, checkpoint, hardware_called("h100"))
    assert setting.peaks == Peaks(989.4e12, 3.35e12, 1978.9e12)
    assert setting.model_cost(checkpoint).weight_itemsize == 1
    assert resolve(job, checkpoint, hardware_called("a100")).peaks is None
    monkeypatch.setattr(resolving, "_device", lambda: "cpu")
    with pytest.raises(JobFileError) as refused:
        resolve(job, checkpoint)
    ((where, text),) = [(one.where, one.message) for one in refused.value.mistakes]
    assert where == "model.quantization"
    assert "only a GPU can multiply in fp8" in text


def test_int4_is_other_work_on_a_gpu_which_does_not_quantise_activations(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    job = job_of(tmp_path, ("model.quantization", "int4"), ("model.dtype", "bfloat16"))
    gpu = resolve(job, checkpoint, hardware_called("h100"))
    cpu = replace(SETTING, quantization="int4")
    same = replace(gpu, max_model_len=cpu.max_model_len)
    assert (gpu.device, gpu.quantization, gpu.peaks) == ("cuda", "int4", Peaks(989.4e12, 3.35e12))
    assert cpu.peaks == Peaks(2e12, 3e10, 4e12)
    assert same.context(checkpoint, "m", "t") != cpu.context(checkpoint, "m", "t")
    ran, there = ({each.name: each for each in one.model_cost(checkpoint).operators} for one in (cpu, gpu))
    assert (ran["qkv"].token.coded_ops > 0, there["qkv"].token.coded_ops) == (True, 0)
    assert ran["lm_head"] == there["lm_head"], "in int8 on both"


def test_weights_in_4_bits_are_stored_where_that_is_asked_for_and_mxfp4_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_published(tmp_path / "int4", tmp_path / "plain", "gptq")
    make_mxfp4(tmp_path / "mxfp4", tmp_path / "plain")
    four, experts = (inspect_checkpoint(tmp_path / name) for name in ("int4", "mxfp4"))
    monkeypatch.setattr(resolving, "_device", lambda: "cpu")
    plain, asked = job_of(tmp_path), job_of(tmp_path, ("model.quantization", "stored"))
    for hardware in (None, hardware_called("h100"), hardware_called("a100")):
        assert resolve(plain, four, hardware).quantization == "none"
        assert resolve(asked, four, hardware).quantization == "stored-int4"
        assert resolve(plain, experts, hardware).quantization == "stored-mxfp4"
    setting = resolve(plain, experts)
    assert setting.arithmetic.endswith(" with stored mxfp4 weights")
    known = {"none", "stored-mxfp4"}
    assert len({replace(setting, quantization=one).context(experts, "m", "t") for one in known}) == 1
    rounded = replace(setting, quantization="int4")
    now = rounded.context(experts, "m", "t")
    monkeypatch.setattr(resolving, "_has_experts", lambda _: False)
    assert rounded.context(experts, "m", "t") != now, "experts were in int8 once"
    half = job_of(tmp_path, ("model.dtype", "float16"))
    assert resolve(half, experts).quantization == "none"


def test_zeros_of_sparse_weights_are_left_out_where_a_gpu_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_published(tmp_path / "sparse", tmp_path / "plain", "2:4 sparse")
    sparse = inspect_checkpoint(tmp_path / "sparse")
    monkeypatch.setattr(resolving, "_device", lambda: "cpu")
    half, asked = ("model.dtype", "bfloat16"), ("model.quantization", "stored")
    fixed, gpu = ("engine.deterministic", "true"), hardware_called("h100")
    found = resolve(job_of(tmp_path, half), sparse, gpu)
    assert (found.quantization, found.arithmetic) == ("stored-sparse", "bfloat16 with stored sparse weights")
    assert found.peaks == Peaks(989.4e12, 3.35e12)
    assert resolve(job_of(tmp_path, half, asked), sparse, gpu).quantization == "stored-sparse"
    same = {replace(found, quantization=one).context(sparse, "m", "t") for one in ("none", "stored-sparse")}
    assert len(same) == 1, "zeros change no sum"
    for sets, place in (((half,), None), ((half, fixed), gpu), ((("model.dtype", "float32"),), gpu)):
        assert resolve(job_of(tmp_path, *sets), sparse, place).quantization == "none"
        with pytest.raises(JobFileError, match="stored: only a GPU can leave out the zeros of 2:4 sparse"):
            resolve(job_of(tmp_path, *sets, asked), sparse, place)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """One that stores fp8 with scales of blocks."""
    folder = tmp_path_factory.mktemp("stored")
    make_fp8(folder / "m", folder / "plain", "llama", block=128)
    return inspect_checkpoint(folder / "m")


def test_codes_of_fp8_are_computed_as_they_are_stored_where_the_gpu_can(
    tmp_path: Path, stored: Checkpoint, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, ("model.dtype", "bfloat16"))
    found = {gpu: resolve(job, stored, hardware_called(gpu)) for gpu in ("h100", "a100")}
    assert {gpu: setting.quantization for gpu, setting in found.items()} == {"h100": "stored", "a100": "none"}
    h100, a100 = found.values()
    assert h100.arithmetic == "bfloat16 with stored fp8 weights"
    assert h100.peaks == Peaks(989.4e12, 3.35e12, 1978.9e12)
    assert h100.context(stored, "m", "t") != a100.context(stored, "m", "t")
    assert h100.model_cost(stored.as_stored()).quantized
    assert resolve(job, checkpoint, hardware_called("h100")).quantization == "none"
    asked = job_of(tmp_path, ("model.quantization", "none"))
    assert resolve(asked, stored, hardware_called("h100")).quantization == "none"
    monkeypatch.setattr(resolving, "_device", lambda: "cpu")
    assert resolve(job, stored).quantization == "none"


def test_stored_codes_are_refused_where_there_are_none_or_nothing_multiplies_them(
    tmp_path: Path, stored: Checkpoint, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, ("model.quantization", "stored"))
    with pytest.raises(JobFileError, match=r"the checkpoint stores no weights that can be"):
        resolve(job, checkpoint, hardware_called("h100"))
    monkeypatch.setattr(resolving, "_device", lambda: "cpu")
    with pytest.raises(JobFileError, match=r"stored: only a GPU can multiply in fp8"):
        resolve(job, stored)


@pytest.mark.parametrize(
    ("said", "visible", "can"),
    [
        (["8.9"], None, True),
        (["9.0", "10.0"], "0,1", True),
        (["8.0"], None, False),
        (["9.0", "8.6"], "0,1", False),
        (["9.0", "8.6"], "0", True),
        (["9.0", "8.6"], "GPU-1", False),
        (["9.0", "8.6"], None, True),  # the first one's kind is used
        (["9.0", "8.6"], "MIG-1", False),
        ([], None, False),
        (["[N/A]"], None, False),
    ],
)
def test_the_driver_says_whether_the_gpus_that_are_used_multiply_fp8(
    monkeypatch: pytest.MonkeyPatch, said: list[str], visible: str | None, can: bool
) -> None:
    """Whatever the peaks of the first one say."""
    lines = "\n".join(f"{number}, GPU-{number}a, {each}" for number, each in enumerate(said))
    monkeypatch.setattr(hardware_module, "_output", lambda _: lines)
    gpus = [Gpu(f"NVIDIA {each}", None) for each in said]
    monkeypatch.setattr(hardware_module, "nvidia_gpus", lambda: gpus)
    found = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    monkeypatch.setattr(hardware_module, "usable_gpus", lambda: usable_gpus(found))
    unknown = Hardware("NVIDIA X", "cuda", None, None)
    assert multiplies_fp8(unknown, here=True) is can
    assert not multiplies_fp8(unknown, here=False)
    known = hardware_called("h100")
    assert multiplies_fp8(known, here=True) is (can or not said)
    assert multiplies_fp8(known, here=False)


ASKED = ("model.quantization", "int8"), ("engine.deterministic", "true")


def test_a_cpu_that_auto_finds_refuses_what_it_cannot_do_in_float16(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it at once, together with what else is wrong. On a GPU it runs."""
    monkeypatch.setattr(resolving, "_device", lambda: "cpu")
    half = job_of(tmp_path, *ASKED, ("model.dtype", "float16"))
    with pytest.raises(JobFileError) as refused:
        resolve(
            job_of(tmp_path, *ASKED, ("model.dtype", "float16"), ("model.max_model_len", "9999")), checkpoint
        )
    assert [one.where for one in refused.value.mistakes] == [
        "model.max_model_len", "model.quantization", "engine.deterministic",
    ]  # fmt: skip
    assert "int8 is not available in float16 on a CPU, which device: auto means here" in str(refused.value)
    assert "use dtype: bfloat16 or float32" in str(refused.value)
    assert resolve(job_of(tmp_path, ("model.dtype", "float16")), checkpoint).dtype == "float16"
    monkeypatch.setattr(resolving, "_device", lambda: "cuda")
    assert resolve(half, checkpoint).arithmetic == "float16 with int8 weights, deterministic"


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_the_options_reach_an_engine_on_a_gpu(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, device: str, dtype: str
) -> None:
    monkeypatch.setattr(resolving, "_device", lambda: "cuda")
    job = job_of(tmp_path, *ASKED, ("engine.device", device), ("model.dtype", dtype))
    setting = resolve(job, checkpoint)
    config = setting.load_config(job)
    assert (config.device, config.quantization, config.deterministic) == ("cuda", "int8", True)
    assert setting.model_cost(checkpoint).weight_itemsize == 1, "what the plan forecasts is int8's, too"


class OfAnother:
    """A stored model that transformers computes, as far as a setting asks."""

    def __init__(self, plain: Checkpoint, modelling: str) -> None:
        self.spec, self.dtype, self.modelling = plain.spec, plain.dtype, modelling

    def refusals(self, quantized: bool, deterministic: bool, coded_cache: bool) -> list[tuple[str, str]]:
        wanted = (
            ("model.quantization", quantized),
            ("engine.deterministic", deterministic),
            ("model.kv_cache_dtype", coded_cache),
        )
        return [(key, "is not to be had") for key, asked in wanted if asked]


def test_another_version_of_transformers_has_answers_of_its_own(checkpoint: Checkpoint) -> None:
    """Only where it computes the model: for a family of ours the context is as if there were no such option."""
    versions = ("batchinfer", "transformers 5.23.0", "transformers 5.24.0")
    contexts = [SETTING.context(OfAnother(checkpoint, one), "m", "t") for one in versions]  # type: ignore[arg-type]
    assert contexts[0] == SETTING.context(checkpoint, "m", "t")
    assert len(set(contexts)) == len(versions)


def test_what_a_model_cannot_is_refused_with_the_job(tmp_path: Path, checkpoint: Checkpoint) -> None:
    asked = (
        ("model.quantization", "int8"),
        ("engine.deterministic", "true"),
        ("model.kv_cache_dtype", "fp8"),
        ("engine.device", "cuda"),
    )
    with pytest.raises(JobFileError) as caught:
        resolve(job_of(tmp_path, *asked), OfAnother(checkpoint, "transformers 5.23.0"))  # type: ignore[arg-type]
    assert [(one.where, one.message) for one in caught.value.mistakes] == [
        ("model.quantization", "is not to be had"),
        ("engine.deterministic", "is not to be had"),
        ("model.kv_cache_dtype", "is not to be had"),
    ]


GPU = Hardware("NVIDIA H100 80GB HBM3", "cuda", None, 80 << 30, {"bfloat16": 9e14}, 3e12, "datasheet")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Four GPUs, of which the last is of another kind; six cores."""
    gpus = [Gpu("NVIDIA H100 80GB HBM3", 80 << 30)] * 3 + [Gpu("NVIDIA T4", 16 << 30)]
    monkeypatch.setattr("batchinfer.machine.hardware.nvidia_gpus", lambda: gpus)
    monkeypatch.setattr(resolving, "detect", lambda device: GPU if device == "cuda" else CPU)
    monkeypatch.setattr(resolving, "usable_cpus", lambda: 6)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("visible", "asked", "gpus"),
    [
        (None, "auto", ("0", "1", "2")),
        (None, "2", ("0", "1")),
        ("3,1", "auto", ("3", "1")),
        ("GPU-a,GPU-b,-1,GPU-c", "auto", ("GPU-a", "GPU-b")),
        ("2", "auto", ()),
        ("", "auto", ()),
        (None, "1", ()),
    ],
)
def test_one_engine_a_gpu(
    tmp_path: Path, checkpoint: Checkpoint, machine: pytest.MonkeyPatch,
    visible: str | None, asked: str, gpus: tuple[str, ...],
) -> None:  # fmt: skip
    if visible is not None:
        machine.setattr(resolving, "usable_gpus", lambda: usable_gpus({"CUDA_VISIBLE_DEVICES": visible}))
    job = job_of(tmp_path, ("engine.device", "cuda"), ("engine.data_parallel", asked))
    setting = resolve(job, checkpoint)
    assert (setting.replicas, setting.gpus) == (max(1, len(gpus)), gpus)
    specs = worker_specs(job, setting, "a:b")
    assert [spec.place.gpu for spec in specs] == (list(gpus) or [None])
    assert setting.peaks == GPU.peaks(setting.dtype)  # of one of them
    config = setting.engine_config(job, 64)
    assert (config.kv_memory, config.memory) == (None, None)


def test_more_engines_than_gpus_are_refused(
    tmp_path: Path, checkpoint: Checkpoint, machine: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, ("engine.device", "cuda"), ("engine.data_parallel", "5"))
    with pytest.raises(JobFileError, match="5 engines need 5 GPUs, but this process may use only 3"):
        resolve(job, checkpoint)


def test_engines_on_a_cpu_divide_it(
    tmp_path: Path, checkpoint: Checkpoint, machine: pytest.MonkeyPatch
) -> None:
    cores = [(0, 1), (2, 3), (4, 5)]
    machine.setattr("batchinfer.pipeline.workers.places.divided_cores", lambda parts: cores[:parts])
    machine.setattr(resolving, "available_memory", lambda: 90 << 30)
    settings = (("engine.data_parallel", "3"), ("engine.threads", "5"), ("engine.kv_memory", "9GiB"))
    job = job_of(tmp_path, ("engine.device", "cpu"), ("model.dtype", "bfloat16"), *settings)
    setting = resolve(job, checkpoint)
    # while rows are read, the engines load: their weights are not counted twice
    machine.setattr(resolving, "available_memory", lambda: 3 << 30)
    config = setting.engine_config(job, 64)
    specs = worker_specs(job, setting, "a:b")
    assert [spec.place for spec in specs] == [EnginePlace(one) for one in cores]
    assert [spec.load.threads for spec in specs] == [1, 2, 2]
    assert (config.kv_memory, config.memory) == (3 << 30, 30 << 30)
    assert setting.peaks == Peaks(2e12 / 3, 1e10)
    assert resolve(job_of(tmp_path, ("engine.device", "cpu")), checkpoint).replicas == 1


def test_ranks_have_a_place_each(tmp_path: Path, checkpoint: Checkpoint, machine: pytest.MonkeyPatch) -> None:
    """Those of an engine beside each other, on a CPU's cores or on GPUs; the engine has the peaks of all."""
    cores = [(0,), (1,), (2,), (3,)]
    machine.setattr("batchinfer.pipeline.workers.places.divided_cores", lambda parts: cores[:parts])
    machine.setattr(resolving, "_most_threads", lambda _: 4)
    divided = (("engine.data_parallel", "2"), ("engine.pipeline_parallel_size", "2"), ("engine.threads", "4"))
    job = job_of(tmp_path, ("engine.device", "cpu"), ("model.dtype", "bfloat16"), *divided)
    setting = resolve(job, checkpoint)
    specs = worker_specs(job, setting, "a:b")
    assert [[one.place.cores for one in (spec, *spec.others)] for spec in specs] == [cores[:2], cores[2:]]
    assert {one.load.threads for spec in specs for one in (spec, *spec.others)} == {1}
    assert {spec.division for spec in specs} == {setting.division}
    assert setting.for_rows(1).replicas == 1
    assert len(worker_specs(job, setting.for_rows(1), "a:b")[0].others) == 1
    gpus = ("engine.device", "cuda"), ("model.dtype", "bfloat16")
    on_gpus = job_of(tmp_path, *gpus, ("engine.tensor_parallel_size", "2"))
    setting = resolve(on_gpus, checkpoint)
    assert (setting.replicas, setting.gpus) == (1, ("0", "1"))  # of three
    alone = GPU.peaks(setting.dtype)
    assert alone is not None
    assert setting.peaks == alone.times(2)


NODES = ("engine.nodes", "{listen: 'here:7700', token_file: token, count: 1}")


@pytest.mark.parametrize(
    ("settings", "machines", "parts"),
    [
        # the machine of each process of each engine, and which part of the machine's processes it is
        ({}, [[0], [1]], [[0], [0]]),
        ({"data_parallel": 6}, [[0], [1]] * 3, [[0], [0], [1], [1], [2], [2]]),
        ({"tensor_parallel_size": 2}, [[0, 0], [1, 1]], [[0, 1], [0, 1]]),
        ({"pipeline_parallel_size": 2}, [[0, 1]], [[0, 0]]),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, [[0, 0, 1, 1]], [[0, 1, 0, 1]]),
        ({"pipeline_parallel_size": 2, "data_parallel": 2}, [[0, 0], [1, 1]], [[0, 1], [0, 1]]),
    ],
)  # fmt: skip
def test_machines_have_as_many_engines_or_as_many_ranks_of_one(
    tmp_path: Path, checkpoint: Checkpoint, machine: pytest.MonkeyPatch,
    settings: dict[str, int], machines: list[list[int]], parts: list[list[int]],
) -> None:  # fmt: skip
    cores = [(number,) for number in range(8)]
    machine.setattr("batchinfer.pipeline.workers.places.divided_cores", lambda parts: cores[:parts])
    machine.setattr(resolving, "_most_threads", lambda threads: threads or 8)
    asked = tuple((f"engine.{name}", str(value)) for name, value in settings.items())
    cpu = (("engine.device", "cpu"), ("model.dtype", "bfloat16"), ("engine.threads", "6"))
    job = job_of(tmp_path, *cpu, NODES, *asked)
    setting = resolve(job, checkpoint)
    specs = worker_specs(job, setting, "a:b")
    each = [one for spec in specs for one in (spec, *spec.others)]
    assert [[one.place.node for one in (spec, *spec.others)] for spec in specs] == machines
    many = len(each) // 2
    wanted = [
        (EnginePlace(node=1, part=(part, many)), 6)
        if number
        else (EnginePlace(cores[part] if many > 1 else ()), 6 // many)
        for part, number in zip(chain(*parts), chain(*machines), strict=True)
    ]
    assert [(one.place, one.load.threads) for one in each] == wanted
    assert setting.division.machines == len({*machines[0]})
    assert (setting.machines_used, setting.for_rows(1).machines_used) == (2, len({*machines[0]}))
    alone = setting.hardware.peaks(setting.dtype)
    assert alone is not None
    assert setting.peaks == alone.times(setting.division.machines).part(setting.engines_here)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data_parallel": 3}, "3 engines cannot be shared out among 2 machines"),
        ({"data_parallel": 1}, "1 engine cannot be shared out among 2 machines"),
        ({"data_parallel": 1, "tensor_parallel_size": 2}, "a multiple of 2 as engine.pipeline_parallel_size"),
        ({"data_parallel": 6, "threads": 2}, "3 engines need 3 cores"),
    ],
)
def test_machines_that_would_have_different_shares_are_refused(
    tmp_path: Path, checkpoint: Checkpoint, machine: pytest.MonkeyPatch, settings: dict[str, int], said: str
) -> None:
    machine.setattr(resolving, "_most_threads", lambda threads: threads or 8)
    asked = tuple((f"engine.{name}", str(value)) for name, value in settings.items())
    job = job_of(tmp_path, ("engine.device", "cpu"), ("model.dtype", "bfloat16"), NODES, *asked)
    with pytest.raises(JobFileError, match=said):
        resolve(job, checkpoint)


@pytest.mark.parametrize(
    ("settings", "refusal", "said"),
    [
        ({"tensor_parallel_size": 2, "deterministic": True}, Unavailable, "engine.expert_parallel_size keep the bits"),
        ({"tensor_parallel_size": 3}, CannotSplit, r"can be divided among 1, 2"),
        ({"pipeline_parallel_size": 5}, CannotSplit, r"engine.pipeline_parallel_size is \d+ at the most"),
        (
            {"pipeline_parallel_size": 2, "device": "cuda", "nodes": '{listen: "10.0.0.1:7", token_file: t, count: 1}'},
            CannotSplit, "among GPUs of one machine alone",
        ),
        ({"tensor_parallel_size": 2, "data_parallel": 3}, JobFileError, "3 engines of 2 ranks each need 6 cores"),
        ({"tensor_parallel_size": 2, "threads": 1}, JobFileError, "2 ranks need 2 cores"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(
    tmp_path: Path, checkpoint: Checkpoint, machine: pytest.MonkeyPatch,
    settings: dict[str, Any], refusal: type[BatchInferError], said: str,
) -> None:  # fmt: skip
    machine.setattr(resolving, "usable_cpus", lambda: 4)
    asked = {"device": "cpu", **settings}
    job = job_of(tmp_path, *((f"engine.{name}", str(value).lower()) for name, value in asked.items()))
    with pytest.raises(refusal, match=said):
        resolve(job, checkpoint)


def test_a_single_engine_has_the_machine_to_itself(tmp_path: Path, checkpoint: Checkpoint) -> None:
    job = job_of(tmp_path, ("engine.device", "cpu"))
    setting = resolve(job, checkpoint)
    config = setting.engine_config(job, 64)
    assert worker_specs(job, setting, "a:b") == [WorkerSpec(config.load, job.model.path, "a:b")]
    assert (config.load.threads, config.memory) == (None, None)


def test_bits_that_are_promised_do_not_come_from_gpus_of_several_kinds(
    tmp_path: Path, checkpoint: Checkpoint, machine: pytest.MonkeyPatch
) -> None:
    machine.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    gpu, deterministic = ("engine.device", "cuda"), ("engine.deterministic", "true")
    assert resolve(job_of(tmp_path, gpu), checkpoint).replicas == 2
    with pytest.raises(JobFileError, match="all engines need GPUs of one kind"):
        resolve(job_of(tmp_path, gpu, deterministic), checkpoint)
    assert (
        resolve(job_of(tmp_path, gpu, deterministic, ("engine.data_parallel", "1")), checkpoint).replicas == 1
    )
