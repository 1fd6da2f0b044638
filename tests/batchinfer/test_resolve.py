"""What a job's options become on a device: settings, refusals, and the context of every work key."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from batchinfer import resolve as resolving
from batchinfer.errors import JobFileError
from batchinfer.job import Job, load_job
from batchinfer.models.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.report.hardware import Hardware
from batchinfer.resolve import Setting, resolve
from batchinfer_kernels.cost import Peaks
from tests.checkpoints import make_checkpoint

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


def test_the_context_of_a_default_job_is_what_it_always_was(checkpoint: Checkpoint) -> None:
    """Stored answers are found by it: new options must not change it where they are not used."""
    parts = {
        "task": "generate", "model": "m", "tokenizer": "t", "dtype": "bfloat16", "quantization": "none",
        "max_model_len": 512, "eos": [257], "numerics": resolving.NUMERICS_VERSION,
    }  # fmt: skip
    wanted = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()
    assert SETTING.context(checkpoint, "m", "t") == wanted


def test_every_arithmetic_has_answers_of_its_own(checkpoint: Checkpoint) -> None:
    settings = [
        replace(SETTING, quantization=quantization, deterministic=deterministic, dtype=dtype)
        for quantization in ("none", "int8")
        for deterministic in (False, True)
        for dtype in ("bfloat16", "float32")
    ]
    assert len({one.context(checkpoint, "m", "t") for one in settings}) == len(settings)


def test_the_size_of_blocks_counts_only_where_bits_do(checkpoint: Checkpoint) -> None:
    """It decides in what order attention adds: too little for another answer, enough for other bits."""
    for deterministic in (False, True):
        contexts = {
            replace(SETTING, deterministic=deterministic, block_size=size).context(checkpoint, "m", "t")  # type: ignore[arg-type]
            for size in ("auto", 8, 32)
        }
        assert len(contexts) == (3 if deterministic else 1)


def test_the_options_reach_the_engine(tmp_path: Path, checkpoint: Checkpoint) -> None:
    job = job_of(tmp_path, ("model.quantization", "int8"), ("engine.deterministic", "true"))
    setting = resolve(job, checkpoint)
    config = setting.engine_config(job, 100)
    assert (setting.quantization, setting.deterministic) == ("int8", True)
    assert (config.quantization, config.deterministic) == ("int8", True)
    plain = resolve(job_of(tmp_path), checkpoint).engine_config(job_of(tmp_path), 100)
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
    assert SETTING.decoder_shape(checkpoint).weight_itemsize == 2
    assert quantized.decoder_shape(checkpoint).quantized
    unmeasured = replace(CPU, peak_flops={"bfloat16": 2e12})
    assert replace(quantized, hardware=unmeasured).peaks is None


def test_a_gpu_that_auto_finds_refuses_what_it_cannot_do_yet(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it at once, together with what else is wrong."""
    monkeypatch.setattr(resolving, "_device", lambda: "cuda")
    asked = ("model.quantization", "int8"), ("engine.deterministic", "true"), ("model.max_model_len", "9999")
    with pytest.raises(JobFileError) as refused:
        resolve(job_of(tmp_path, *asked), checkpoint)
    assert [one.where for one in refused.value.mistakes] == [
        "model.max_model_len", "model.quantization", "engine.deterministic",
    ]  # fmt: skip
    assert "int8 is not available on a GPU yet" in str(refused.value)
    assert "engine.device: cpu" in str(refused.value)
    on_cpu = resolve(job_of(tmp_path, *asked[:2], ("engine.device", "cpu")), checkpoint)
    assert on_cpu.device == "cpu"
    resolve(job_of(tmp_path), checkpoint)
