"""Measures the accuracy of int8 and of quantised KV caches on the quickstart's model: divergence, and right
answers.

`pytest -s -m slow tests/batchinfer/test_quality.py` prints the numbers of docs/measurements/quantisation.md.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Sequence as Seq
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from batchinfer.core.statistics.quality import Quality
from batchinfer.models import sources
from batchinfer.models.calibration import search
from batchinfer.models.calibration.sample import SampleRows
from batchinfer.models.calibration.search import Search
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.ops.attention import AttentionInputs, HeadTurn, LayerCache
from batchinfer.models.ops.layers import Head, Linear, Weight, values_of
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.spec import spec
from batchinfer.models.spec.spec import LayerSpec, LinearSpec
from batchinfer_kernels.arithmetic import CacheDtype, Dtype, KvCacheDtype, Quantization
from batchinfer_kernels.fp8_matmul import fp8_matmul_reference, quantize_rows_fp8
from batchinfer_kernels.paged_attention import CODES
from batchinfer_kernels.rope_store import quantize_heads_reference
from tests.batchinfer.engine.small_engine import Place, cpu_ops, quantized
from tests.batchinfer.engine.teacher_forced import Forced, Row, Way, load
from tests.batchinfer.test_quickstart_job import accuracy, run

QUICKSTART = Path(__file__).parents[2] / "jobs" / "quickstart"
SAMPLE, THINNED = 400, 40
OUTLIERS = [17, 101]  # of 192 channels
# Factors of outliers. Int8 without smoothing loses 1.0e-4, 2.3e-3 and 4.1 nats
TIMES = (10, 30, 300)
# Nats. Over 15,096 positions of 400 rows: float32 from bfloat16 4e-6 on average and 0.03 at worst, int8 4e-5
# and 0.11.
MOST_MEAN, MOST = 5e-4, 1.0


@cache
def forced_rows(count: int) -> tuple[Row, ...]:
    """Return `count` rows of the job, evenly spread, as tokens with their right answers."""
    if str(QUICKSTART) not in sys.path:
        sys.path.insert(0, str(QUICKSTART))
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    system = importlib.import_module("train").instruction()
    clean = importlib.import_module("accuracy").clean_rows()
    return tuple(_forced(tokenizer, system, row) for row in clean[:: len(clean) // count][:count])


def _forced(tokenizer: Any, system: str, row: Any) -> Row:
    chat = [{"role": "system", "content": system}, {"role": "user", "content": row.text}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    answer = [*tokenizer.encode(row.expected, add_special_tokens=False), tokenizer.eos_token_id]
    return Row(list(prompt), answer)


def log_probabilities(
    rows: Seq[Row],
    dtype: Dtype,
    quantization: Quantization = "none",
    model: Path = QUICKSTART / "model",
    kv_cache: KvCacheDtype = "auto",
) -> Tensor:
    """Return the log-probabilities before each answer token, [positions, vocabulary], by a job's operators."""
    loaded = load(model, dtype, quantization, deterministic=False, blocks=4000, kv_cache=kv_cache)
    seen: dict[Place, Tensor] = Forced(loaded, rows, Way(2048, seqs=256, threads=2)).run()
    return torch.stack([seen[place] for place in sorted(seen)]).double().log_softmax(-1)


def divergence(of: Tensor, against: Tensor) -> Tensor:
    """Return KL(of ‖ against) in nats at each position."""
    return (of.exp() * (of - against)).sum(-1)


def told(what: str, of: Tensor, against: Tensor, rows: int) -> Tensor:
    """Return KL(of ‖ against), and print the numbers of docs/measurements/quantisation.md."""
    off, same = divergence(of, against), of.argmax(-1).eq(against.argmax(-1)).double().mean()
    found = f"mean {off.mean():.2e}, 99th percentile {off.quantile(0.99):.2e}, largest {off.max():.2e} nats"
    print(f"KL({what}) over {len(off)} positions of {rows} rows: {found}; most likely token: {same:.3%}")
    return off


def measured(
    rows: Seq[Row], dtype: Dtype, quantization: Quantization, model: Path = QUICKSTART / "model"
) -> Tensor:
    """Return the KL divergence from the model in bfloat16."""
    plain = log_probabilities(rows, "bfloat16", model=model)
    other = log_probabilities(rows, dtype, quantization, model)
    return told(f"bfloat16 || {dtype}, {quantization}", plain, other, len(rows))


def test_int8_is_near_bfloat16() -> None:
    found = measured(forced_rows(THINNED // 2), "bfloat16", "int8")
    assert found.mean() < MOST_MEAN
    assert found.max() < MOST


class RoundedCache(TorchOps):
    """Rounds K and V to the cache's quantised values, as a GPU's operators read them."""

    def __init__(self, kept: CacheDtype) -> None:
        super().__init__()
        self._kept = CODES[kept]

    def rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn, inputs: AttentionInputs, cache: LayerCache
    ) -> Tensor:
        rotated = super().rope_store(q, k, v, turn, inputs, cache)
        real = inputs.slots[inputs.slots >= 0]
        blocks, places = real // cache.block_size, real % cache.block_size
        for values in (cache.k, cache.v):
            codes, scales = quantize_heads_reference(values[blocks, :, places], self._kept)
            values[blocks, :, places] = (codes.float() * scales[..., None]).to(values.dtype)
        return rotated


class Fp8Linear(Linear):
    """A linear layer with the arithmetic of batchinfer_kernels.fp8_matmul, as on a GPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._bias = quantize_rows_fp8(weight), bias

    def __call__(self, x: Tensor) -> Tensor:
        return fp8_matmul_reference(x, *self._weight, self._bias)


class Fp8Head(Fp8Linear, Head):
    """An fp8 head for logits."""

    def __call__(self, x: Tensor) -> Tensor:
        return fp8_matmul_reference(x, *self._weight, out_dtype=torch.float32)


class Fp8Weights(TorchOps):
    """Operators with linear layers in fp8."""

    def pack_linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        return Fp8Linear(values_of(weight, self.name), bias)

    def pack_head(self, weight: Weight) -> Head:
        return Fp8Head(values_of(weight, self.name))


def measured_codes(monkeypatch: pytest.MonkeyPatch, coded: TorchOps, what: str, dtype: Dtype) -> Tensor:
    """Return the KL divergence of quantised caches from torch's operators on float ones."""
    rows, found = forced_rows(SAMPLE), []
    for ops in (TorchOps(), coded):
        monkeypatch.setattr(sources, "choose_ops", lambda *_, ops=ops, **__: ops)
        found.append(log_probabilities(rows, dtype))
    return told(f"{dtype} || {dtype} with {what}", *found, len(rows))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_quantised_cache_on_a_cpu_is_close_to_a_float_one(dtype: Dtype) -> None:
    rows = forced_rows(SAMPLE)
    values, codes = log_probabilities(rows, dtype), log_probabilities(rows, dtype, kv_cache="int8")
    off = told(f"{dtype} || {dtype} with an int8 KV cache on the CPU", values, codes, len(rows))
    assert 1e-8 < off.mean() < MOST_MEAN
    assert off.max() < MOST


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_divergence_of_a_quantised_cache(
    monkeypatch: pytest.MonkeyPatch, kept: CacheDtype, dtype: Dtype
) -> None:
    off = measured_codes(monkeypatch, RoundedCache(kept), f"{kept} KV cache", dtype)
    assert 1e-8 < off.mean() < MOST_MEAN
    assert off.max() < MOST


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_divergence_of_fp8_weights(monkeypatch: pytest.MonkeyPatch, dtype: Dtype) -> None:
    off = measured_codes(monkeypatch, Fp8Weights(), "fp8 weights", dtype)
    assert off.mean() < MOST_MEAN
    assert off.max() < MOST


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", "none"), ("bfloat16", "int8"), ("float32", "int8")]
)
def test_the_divergence_of_other_arithmetics(dtype: Dtype, quantization: Quantization) -> None:
    found = measured(forced_rows(SAMPLE), dtype, quantization)
    assert found.mean() < MOST_MEAN
    assert found.max() < MOST


def with_outliers(folder: Path, times: int) -> Path:
    """Copy the quickstart's model with two channels of each norm scaled up, and their readers scaled down.

    The function is the same until activations are rounded to int8.
    """
    shutil.copytree(QUICKSTART / "model", folder)
    tensors = load_file(folder / "model.safetensors")
    for name, norm in tensors.items():
        if name.endswith("layernorm.weight"):
            layer = name.rsplit(".", 2)[0]
            readers = (
                ("self_attn.q", "self_attn.k", "self_attn.v") if "input" in name else ("mlp.gate", "mlp.up")
            )
            norm[OUTLIERS] *= times
            for reader in readers:
                tensors[f"{layer}.{reader}_proj.weight"][:, OUTLIERS] /= times
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("times", TIMES)
def test_outlier_channels_of_norms_cost_int8_nothing(times: int, tmp_path: Path) -> None:
    model, rows = with_outliers(tmp_path / "model", times), forced_rows(SAMPLE)
    unchanged = divergence(
        log_probabilities(rows, "bfloat16"), log_probabilities(rows, "bfloat16", model=model)
    )
    print(f"two channels × {times}, bfloat16 as it is:")
    found = measured(rows, "bfloat16", "int8", model)
    assert unchanged.mean() < MOST_MEAN, "it is not the same function"
    assert found.mean() < MOST_MEAN


@pytest.mark.slow
def test_accuracy_holds_in_every_arithmetic(tmp_path: Path) -> None:
    """Accuracy lost against float32: at most 0.3 points in bfloat16, 1 in int8."""
    right = {}
    for name, dtype, quantization in (
        ("float32", "float32", "none"),
        ("bfloat16", "bfloat16", "none"),
        ("int8", "bfloat16", "int8"),
    ):
        options = ("--set", f"model.dtype={dtype}", "--set", f"model.quantization={quantization}")
        row = run(tmp_path / name, *options)
        assert (row["dtype"], row["quantization"]) == (dtype, quantization)
        clean, _, right[name] = accuracy(tmp_path / name)
        print(
            f"{name}: {right[name]:.2%} of {clean} rows, {row['engine_s']:.1f} s in the engine, {row['ops']}"
        )
    assert right["bfloat16"] >= right["float32"] - 0.003
    assert right["int8"] >= right["float32"] - 0.01


def calibrated(rows: Seq[Row], group: int) -> Quality:
    """Calibrate on every eighth row, and return the loss of the other rows at their answers' tokens."""
    checkpoint = inspect_checkpoint(QUICKSTART / "model")
    searched, held_out = rows[::8], [row for number, row in enumerate(rows) if number % 8]
    sample, unseen = (
        SampleRows.of((np.array(row.prompt + row.answer[:-1], np.int32), len(row.prompt)) for row in some)
        for some in (searched, held_out)
    )
    ops = cpu_ops(quantized(checkpoint, "int4"))
    made = Search(checkpoint, ops, torch.bfloat16, (sample, unseen), group=group)
    list(made.layers())
    loss = made.loss()
    assert loss is not None
    said = f"KL {loss.kl:.2e} nats, same token {loss.top1:.3%}, {loss.positions} positions"
    print(f"int4 in groups of {group}, calibrated: {said}")
    return loss


def all_linears(layer: LayerSpec, *_: object) -> list[LinearSpec]:
    """Return all linear layers, even if the last group is partial, which checkpoints cannot store."""
    return list(layer.linears)


def test_calibrated_int4_is_nearer_than_rounded_int4() -> None:
    rows = forced_rows(THINNED)
    plain = measured(rows, "bfloat16", "int4")
    found = calibrated(rows, 32)
    assert found.kl < plain.mean() / 2
    assert found.kl < MOST_MEAN
    assert found.top1 > 0.999


@pytest.mark.slow
@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_divergence_of_calibrated_int4(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "INT4_GROUP", group)
    monkeypatch.setattr(search, "rounded_linears", all_linears)
    rows = forced_rows(SAMPLE)
    plain = measured(rows, "bfloat16", "int4")
    assert calibrated(rows, group).kl < plain.mean() / 3
