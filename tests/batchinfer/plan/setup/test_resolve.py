"""Options of a job become settings for a machine, or are refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from batchinfer.core.errors import JobFileError
from batchinfer.job import Job, load_job
from batchinfer.machine import hardware
from batchinfer.machine.facts import MachineFacts, this_machine
from batchinfer.machine.hardware import Hardware, hardware_by_name
from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.spec.spec import AttentionSpec
from batchinfer.plan.setup import numerics
from batchinfer.plan.setup.resolve import resolve
from batchinfer_kernels.cost import Peaks
from tests.checkpoints import make_checkpoint
from tests.packed_weights import make_fp8, make_mxfp4
from tests.published_formats import make_published
from tests.settings import changed, setting_of

CPU = Hardware("Test CPU", "cpu", 2, None, {"bfloat16": 2e12, "int8": 4e12}, 3e10, "measured")
SETTING = setting_of(CPU)
HERE = MachineFacts(CPU, cores=6, free_memory=90 << 30, fast_bf16=True)
ASKED = ("model.quantization", "int8"), ("engine.deterministic", "true")
GPU_HERE = MachineFacts(Hardware("a GPU", "cuda", None, None), gpus=())


def named(name: str) -> MachineFacts:
    return MachineFacts(hardware_by_name(name))


def job_of(folder: Path, *settings: tuple[str, str]) -> Job:
    (folder / "m").mkdir(exist_ok=True)
    (folder / "job.yaml").write_text(
        "name: a\nmodel: {path: m}\ninput: {path: a.jsonl}\nprompt: {text: t}\noutput: {path: out}\n"
    )
    return load_job(folder / "job.yaml", settings)


@pytest.mark.parametrize("given", [False, True])
def test_tiles_are_used_if_the_system_grants_them(
    tmp_path: Path, checkpoint: Checkpoint, given: bool
) -> None:
    setting = resolve(job_of(tmp_path), checkpoint, replace(HERE, tiles=given))
    assert setting.numerics.tiles is given
    assert setting.load_config(job_of(tmp_path)).tiles is given


def test_a_job_is_set_up_for_the_given_machine_and_not_this_one(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine has one core and slow bfloat16."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(hardware, "FAST_BF16_FLAGS", frozenset())
    checkpoint = replace(checkpoint, spec=replace(checkpoint.spec, dtype="bfloat16"))
    driver = this_machine("cpu")
    job = job_of(tmp_path, ("engine.pipeline_parallel_size", "2"), ("engine.data_parallel", "3"))
    with pytest.raises(JobFileError, match=r"3 engines of 2 ranks each need 6 cores, but .* only 1"):
        resolve(job, checkpoint, driver)
    setting = resolve(job, checkpoint, HERE)
    assert (setting.numerics.dtype, setting.numerics.tiles) == ("bfloat16", False)
    assert (setting.placement.replicas, setting.placement.machine) == (3, HERE)
    assert setting.engine_config(job, 64).memory == 30 << 30
    assert resolve(job_of(tmp_path), checkpoint, driver).numerics.dtype == "float32"
    gpu = resolve(job, checkpoint, replace(GPU_HERE, gpus=tuple("01234567")))
    assert (gpu.device, gpu.numerics.dtype, gpu.placement.gpus) == ("cuda", "bfloat16", tuple("012345"))


def test_the_options_reach_the_engine(tmp_path: Path, checkpoint: Checkpoint) -> None:
    job = job_of(tmp_path, *ASKED, ("model.dtype", "bfloat16"))
    setting = resolve(job, checkpoint, HERE)
    config = setting.load_config(job)
    assert (setting.numerics.quantization, setting.numerics.deterministic) == ("int8", True)
    assert (config.quantization, config.deterministic) == ("int8", True)
    assert setting.numerics.text == "bfloat16 with int8 weights, deterministic"
    plain = resolve(job_of(tmp_path), checkpoint, HERE).load_config(job_of(tmp_path))
    assert (plain.quantization, plain.deterministic) == ("none", False)
    for device, dtype in (("auto", "auto"), ("cuda", "float32"), ("cuda", "float16")):
        job = job_of(tmp_path, *ASKED, ("engine.device", device), ("model.dtype", dtype))
        setting = resolve(job, checkpoint, GPU_HERE)
        config = setting.load_config(job)
        assert (config.device, config.quantization, config.deterministic) == ("cuda", "int8", True)
        assert setting.model_cost(checkpoint).weight_itemsize == 1, "the forecast also assumes int8"


def test_quantised_linear_layers_have_their_own_peak(checkpoint: Checkpoint) -> None:
    quantized = changed(SETTING, quantization="int8")
    assert SETTING.peaks == Peaks(2e12, 3e10)
    assert quantized.peaks == Peaks(2e12, 3e10, 4e12)
    assert SETTING.model_cost(checkpoint).weight_itemsize == 2
    assert quantized.model_cost(checkpoint).quantized
    unmeasured = replace(CPU, peak_flops={"bfloat16": 2e12})
    assert changed(quantized, hardware=unmeasured).peaks is None


def test_a_cache_of_codes_reaches_engine_and_forecast(tmp_path: Path, checkpoint: Checkpoint) -> None:
    job = job_of(tmp_path, ("model.kv_cache_dtype", "fp8"), ("model.dtype", "bfloat16"))
    setting = resolve(job, checkpoint, GPU_HERE)
    assert setting.load_config(job).kv_cache == "fp8"
    assert setting.numerics.text == "bfloat16 with fp8 KV cache"
    plain = changed(setting, kv_cache="auto").model_cost(checkpoint)
    spec = checkpoint.spec.attention
    assert isinstance(spec, AttentionSpec)
    coded, whole = (cost.kv_bytes(100) for cost in (setting.model_cost(checkpoint), plain))
    assert coded * 2 * spec.head_dim == whole * (spec.head_dim + 4), "a byte a value, and a scale a head"


def test_caches_that_are_refused_in_fp8_and_of_latents(tmp_path: Path, checkpoint: Checkpoint) -> None:
    with pytest.raises(JobFileError, match=r"kv_cache_dtype.*fp8: only a GPU can read and write it"):
        resolve(job_of(tmp_path, ("model.kv_cache_dtype", "fp8")), checkpoint, HERE)
    coded = ("model.kv_cache_dtype", "int8")
    assert resolve(job_of(tmp_path, coded), checkpoint, HERE).numerics.kv_cache == "int8"
    with pytest.raises(JobFileError, match=r"kv_cache_dtype.*int8 is not available in float16 on a CPU"):
        resolve(job_of(tmp_path, coded, ("model.dtype", "float16")), checkpoint, HERE)
    make_checkpoint(tmp_path / "latent", "deepseek_v3")
    latent = inspect_checkpoint(tmp_path / "latent")
    assert latent.refusals(False, True, False) == []
    ((key, why),) = latent.refusals(False, True, True)
    assert key == "model.kv_cache_dtype"
    assert "caches latents" in why


def test_fp8_has_a_peak_of_its_own_and_no_cpu(tmp_path: Path, checkpoint: Checkpoint) -> None:
    job = job_of(tmp_path, ("model.quantization", "fp8"), ("model.dtype", "float16"))
    setting = resolve(job, checkpoint, named("h100"))
    assert setting.peaks == Peaks(989.4e12, 3.35e12, 1978.9e12)
    assert setting.model_cost(checkpoint).weight_itemsize == 1
    assert resolve(job, checkpoint, named("a100")).peaks is None
    with pytest.raises(JobFileError) as refused:
        resolve(job, checkpoint, HERE)
    ((where, text),) = [(one.where, one.message) for one in refused.value.mistakes]
    assert where == "model.quantization"
    assert "only a GPU can multiply in fp8" in text


def test_int4_on_a_gpu_leaves_activations_as_they_are(tmp_path: Path, checkpoint: Checkpoint) -> None:
    job = job_of(tmp_path, ("model.quantization", "int4"), ("model.dtype", "bfloat16"))
    gpu = resolve(job, checkpoint, named("h100"))
    cpu = changed(SETTING, quantization="int4")
    same = changed(gpu, max_model_len=cpu.numerics.max_model_len)
    assert (gpu.device, gpu.numerics.quantization, gpu.peaks) == ("cuda", "int4", Peaks(989.4e12, 3.35e12))
    assert cpu.peaks == Peaks(2e12, 3e10, 4e12)
    assert same.numerics.context(checkpoint, "m", "t") != cpu.numerics.context(checkpoint, "m", "t")
    ran, there = ({each.name: each for each in one.model_cost(checkpoint).operators} for one in (cpu, gpu))
    assert (ran["qkv"].token.coded_ops > 0, there["qkv"].token.coded_ops) == (True, 0)
    assert ran["lm_head"] == there["lm_head"], "in int8 on both"


def test_stored_int4_is_opt_in_and_stored_mxfp4_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_published(tmp_path / "int4", tmp_path / "plain", "gptq")
    make_mxfp4(tmp_path / "mxfp4", tmp_path / "plain")
    four, experts = (inspect_checkpoint(tmp_path / name) for name in ("int4", "mxfp4"))
    plain, asked = job_of(tmp_path), job_of(tmp_path, ("model.quantization", "stored"))
    for machine in (HERE, named("h100"), named("a100")):
        assert resolve(plain, four, machine).numerics.quantization == "none"
        assert resolve(asked, four, machine).numerics.quantization == "stored-int4"
        assert resolve(plain, experts, machine).numerics.quantization == "stored-mxfp4"
    setting = resolve(plain, experts, HERE)
    assert setting.numerics.text.endswith(" with stored mxfp4 weights")
    known = {"none", "stored-mxfp4"}
    assert len({changed(setting, quantization=one).numerics.context(experts, "m", "t") for one in known}) == 1
    rounded = changed(setting, quantization="int4")
    now = rounded.numerics.context(experts, "m", "t")
    monkeypatch.setattr(numerics, "_has_experts", lambda _: False)
    assert rounded.numerics.context(experts, "m", "t") != now, "experts were in int8 once"
    half = job_of(tmp_path, ("model.dtype", "float16"))
    assert resolve(half, experts, HERE).numerics.quantization == "none"


def test_zeros_of_sparse_weights_are_left_out_where_a_gpu_can(tmp_path: Path) -> None:
    make_published(tmp_path / "sparse", tmp_path / "plain", "2:4 sparse")
    sparse = inspect_checkpoint(tmp_path / "sparse")
    half, asked = ("model.dtype", "bfloat16"), ("model.quantization", "stored")
    fixed, gpu = ("engine.deterministic", "true"), named("h100")
    found = resolve(job_of(tmp_path, half), sparse, gpu)
    assert found.numerics.quantization == "stored-sparse"
    assert found.numerics.text == "bfloat16 with stored sparse weights"
    assert found.peaks == Peaks(989.4e12, 3.35e12)
    assert resolve(job_of(tmp_path, half, asked), sparse, gpu).numerics.quantization == "stored-sparse"
    same = {
        changed(found, quantization=one).numerics.context(sparse, "m", "t")
        for one in ("none", "stored-sparse")
    }
    assert len(same) == 1, "zeros change no sum"
    for sets, place in (((half,), HERE), ((half, fixed), gpu), ((("model.dtype", "float32"),), gpu)):
        assert resolve(job_of(tmp_path, *sets), sparse, place).numerics.quantization == "none"
        with pytest.raises(JobFileError, match="stored: only a GPU can leave out the zeros of 2:4 sparse"):
            resolve(job_of(tmp_path, *sets, asked), sparse, place)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint that stores fp8 weights with block scales."""
    folder = tmp_path_factory.mktemp("stored")
    make_fp8(folder / "m", folder / "plain", "llama", block=128)
    return inspect_checkpoint(folder / "m")


def test_stored_fp8_is_multiplied_by_gpus(tmp_path: Path, stored: Checkpoint, checkpoint: Checkpoint) -> None:
    job = job_of(tmp_path, ("model.dtype", "bfloat16"))
    found = {gpu: resolve(job, stored, named(gpu)) for gpu in ("h100", "a100")}
    h100, a100 = found.values()
    assert (h100.numerics.quantization, a100.numerics.quantization) == ("stored", "none")
    assert h100.numerics.text == "bfloat16 with stored fp8 weights"
    assert h100.peaks == Peaks(989.4e12, 3.35e12, 1978.9e12)
    assert h100.numerics.context(stored, "m", "t") != a100.numerics.context(stored, "m", "t")
    assert h100.model_cost(stored.keep_quantized()).quantized
    assert resolve(job, checkpoint, named("h100")).numerics.quantization == "none"
    asked = job_of(tmp_path, ("model.quantization", "none"))
    assert resolve(asked, stored, named("h100")).numerics.quantization == "none"
    assert resolve(job, stored, HERE).numerics.quantization == "none"


def test_stored_codes_that_are_refused(tmp_path: Path, stored: Checkpoint, checkpoint: Checkpoint) -> None:
    job = job_of(tmp_path, ("model.quantization", "stored"))
    with pytest.raises(JobFileError, match=r"the checkpoint stores no weights that can be"):
        resolve(job, checkpoint, named("h100"))
    with pytest.raises(JobFileError, match=r"stored: only a GPU can multiply in fp8"):
        resolve(job, stored, HERE)


def test_a_cpu_refuses_what_it_cannot_do_in_float16(tmp_path: Path, checkpoint: Checkpoint) -> None:
    half = job_of(tmp_path, *ASKED, ("model.dtype", "float16"))
    wrong = job_of(tmp_path, *ASKED, ("model.dtype", "float16"), ("model.max_model_len", "9999"))
    with pytest.raises(JobFileError) as refused:
        resolve(wrong, checkpoint, HERE)
    assert [one.where for one in refused.value.mistakes] == [
        "model.max_model_len", "model.quantization", "engine.deterministic",
    ]  # fmt: skip
    assert "int8 is not available in float16 on a CPU, which device: auto means here" in str(refused.value)
    assert "use dtype: bfloat16 or float32" in str(refused.value)
    assert resolve(job_of(tmp_path, ("model.dtype", "float16")), checkpoint, HERE).numerics.dtype == "float16"
    assert resolve(half, checkpoint, GPU_HERE).numerics.text == "float16 with int8 weights, deterministic"


class OfAnother:
    """A stored model that transformers computes. Has the attributes that settings read."""

    def __init__(self, plain: Checkpoint, modelling: str) -> None:
        self.spec, self.dtype, self.modelling = plain.spec, plain.dtype, modelling

    def refusals(self, quantized: bool, deterministic: bool, coded_cache: bool) -> list[tuple[str, str]]:
        wanted = (
            ("model.quantization", quantized),
            ("engine.deterministic", deterministic),
            ("model.kv_cache_dtype", coded_cache),
        )
        return [(key, "is not to be had") for key, asked in wanted if asked]


def test_what_a_model_cannot_is_refused_with_the_job(tmp_path: Path, checkpoint: Checkpoint) -> None:
    asked = (*ASKED, ("model.kv_cache_dtype", "fp8"), ("engine.device", "cuda"))
    with pytest.raises(JobFileError) as caught:
        resolve(job_of(tmp_path, *asked), OfAnother(checkpoint, "transformers 5.23.0"), GPU_HERE)  # type: ignore[arg-type]
    keys = ("model.quantization", "engine.deterministic", "model.kv_cache_dtype")
    told = [(one.where, one.message) for one in caught.value.mistakes]
    assert told == [(key, "is not to be had") for key in keys]
