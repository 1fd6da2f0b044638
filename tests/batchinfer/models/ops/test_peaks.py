"""Tests the measurement of peaks; the sizes are too small for real values."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch

from batchinfer.core.errors import Unavailable
from batchinfer.models.ops import peaks, products


def test_every_dtype_and_both_streams_are_measured() -> None:
    found = peaks.measure_peaks("cpu", size=64, stream_bytes=2**20)
    assert {"bfloat16", "float32"} <= set(found.peak_flops) == set(peaks.dtypes_of("cpu"))
    assert all(value > 0 for value in found.peak_flops.values())
    assert found.peak_by.keys() == found.peak_flops.keys()
    assert found.bandwidth == max(found.read_bytes_per_s, found.copy_bytes_per_s) > 0
    assert found.name is None
    assert found.seconds > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_timed_call_is_a_matrix_product(dtype: torch.dtype) -> None:
    """Otherwise a high rate would be no peak."""
    torch.manual_seed(0)
    x, weight = torch.randn(32, 64).to(dtype), torch.randn(48, 64).to(dtype)
    with torch.inference_mode():
        found = {by: call() for by, call in products.products(x, weight)}
    assert set(found) == {"torch", "compiled"}
    for product in found.values():
        torch.testing.assert_close(product.float(), x.float() @ weight.float().T, atol=0.1, rtol=0.02)


@pytest.mark.parametrize("outputs", [48, 64])
def test_the_timed_int8_call_is_a_matrix_product(outputs: int) -> None:
    torch.manual_seed(0)
    x = torch.randint(-127, 128, (32, 64), dtype=torch.int8)
    x[:, 0] = 127  # the scale of each row is 1
    # CPUs without VNNI add two products in 16 bits, which larger weights would overflow: oneDNN documents it
    weight = torch.randint(-64, 65, (outputs, 64), dtype=torch.int8)
    with torch.inference_mode():
        found = {by: call() for by, call in products.products(x, weight)}
    assert "compiled" in found
    for product in found.values():
        assert torch.equal(product, x.float() @ weight.float().T)


def test_a_peak_is_the_rate_of_the_fastest_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow() -> torch.Tensor:
        time.sleep(0.01)
        return torch.ones(1)

    for slowest, fastest in (("torch", "compiled"), ("compiled", "torch")):
        calls = [(slowest, slow), (fastest, lambda: torch.ones(1))]
        monkeypatch.setattr(peaks, "products", lambda *_, calls=calls: iter(calls))
        found = peaks.measure_peaks("cpu", ("float32",), size=64, stream_bytes=2**20)
        assert found.peak_by == {"float32": fastest}
        assert found.peak_flops["float32"] > 2 * 64**3 / 0.01 > found.rates["float32"][slowest]
        assert found.rates["float32"][fastest] == found.peak_flops["float32"]


def test_the_products_of_layers_are_timed_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight is used once per turn: a cached weight would be unlike a model's."""
    seen, numbers = list[tuple[torch.Size, int]](), count()

    def timed(x: torch.Tensor, weight: torch.Tensor) -> Iterator[tuple[str, Callable[[], None]]]:
        number = next(numbers)
        yield "torch", lambda: seen.append((x.shape + weight.shape, number))
        yield "compiled", lambda: None

    monkeypatch.setattr(peaks, "products", timed)
    found = peaks.measure_layers(("float32", "int8"))
    assert found.keys() == {"float32", "int8"}
    assert all(rates.keys() == {"torch", "compiled"} for rates in found.values())
    assert all(rates["torch"] > 0 for rates in found.values())
    shapes = {shape for shape, _ in seen}
    assert shapes == {(128, inputs, outputs, inputs) for inputs, outputs in peaks.LAYER}
    weights = len(peaks.LAYER) * peaks.LAYERS * 2
    assert len(set(seen)) == weights
    assert len(seen) == weights * (1 + peaks.LAYER_TRIES)


def test_without_a_compiler_the_peaks_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "compiled_operators", lambda: None)
    found = peaks.measure_peaks("cpu", ("bfloat16", "float32"), size=64, stream_bytes=2**20)
    assert set(found.peak_by.values()) == {"torch"}


def test_the_timed_call_of_a_gpu_is_a_matrix_product() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randint(-127, 128, (rows, 64), dtype=torch.int8) for rows in (32, 64))
    assert torch.equal(products._integer_product(x, weight)(), (x.long() @ weight.long().T).int())
    x, weight = ((one / 99).to(torch.float8_e4m3fn) for one in (x, weight))
    ((by, call),) = products.products(x, weight)
    assert by == "torch"
    torch.testing.assert_close(call().float(), x.float() @ weight.float().T, atol=0.1, rtol=0.02)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_measured_and_named() -> None:
    found = peaks.measure_peaks("cuda", size=512, stream_bytes=2**24)
    assert set(found.peak_flops) == set(peaks.dtypes_of("cuda"))
    assert set(found.peak_flops) - {"fp8"} == {"bfloat16", "float16", "float32", "int8"}
    assert found.name == torch.cuda.get_device_name()


def test_a_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(Unavailable, match=r"cuda:99: .* finds \d+ GPUs"):
        peaks.measure_peaks("cuda:99", size=64)
    with pytest.raises(ValueError, match="'meta'"):
        peaks.measure_peaks("meta", size=64)
