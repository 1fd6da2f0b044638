"""Tests the memory of adapters, counted before they are loaded."""

from __future__ import annotations

from dataclasses import replace

import torch

from batchinfer.engine.kv.cache_layout import cache_layout
from batchinfer.engine.schedule.step_shape import step_shape
from batchinfer.machine.hardware import Hardware
from batchinfer.models.adapters.factors import AdaptedWeights
from batchinfer.models.adapters.sizes import adapter_sizes
from batchinfer.models.checkpoint.weights import CheckpointWeights
from batchinfer.models.spec.model_cost import model_cost
from batchinfer.models.spec.parameters import FACTOR_A, FACTOR_B
from batchinfer.plan.setup.engine_parts import EngineParts
from batchinfer_kernels.cost import Cost, StepShape, low_rank_cost
from tests.batchinfer.engine.small_engine import checkpoint
from tests.batchinfer.engine.test_adapters import adapters


def test_sizes_equal_the_loaded_factors() -> None:
    for family in ("llama", "phi3", "deepseek_v2"):
        model, stored = checkpoint(family), [*adapters(family).values()]
        found = adapter_sizes(model.spec, stored)
        assert found is not None
        weights = CheckpointWeights(model, torch.float32, "cpu")
        factors = 0
        with AdaptedWeights(weights, model.spec, stored, torch.float32, "cpu") as adapted:
            for layer in range(len(model.spec.layers)):
                parts = adapted.layer(layer).items()
                factors += sum(each.numel() for name, each in parts if FACTOR_A in name or FACTOR_B in name)
        assert (found.count, found.values) == (3, factors)
    assert adapter_sizes(checkpoint("llama").spec, []) is None


def test_a_step_costs_what_its_tokens_with_adapters_and_their_factors_do() -> None:
    model, stored = checkpoint("llama"), adapters("llama")
    plain = model_cost(model.spec, 2)
    one = adapter_sizes(model.spec, [stored["one"]])
    assert one is not None
    cost = one.with_cost(plain)
    assert (plain.adapted, cost.adapted) == (False, True)
    chunks = [(None, 0, 5), (None, 3, 1), (None, 9, 1), (None, 0, 2)]
    layout = cache_layout(model.spec.caches, 16, 64)
    shape = step_shape(chunks, 4, 0, layout, adapters=["one", "", "two", "one"])
    assert (shape.adapted, shape.adapters) == (8, 2)
    assert step_shape(chunks, 4, 0, layout).adapted == step_shape(chunks, 4, 0, layout).adapters == 0
    for step in (shape, StepShape(9, 4, 0, 0, adapted=8, adapters=2)):
        got, without = cost.step(step), plain.step(step)
        own = got.pop("adapters")
        assert got == without
        sizes = ((each.inputs, each.outputs, rank) for each in one.products for rank in each.ranks)
        assert own == sum((low_rank_cost(8, 2, *each, 2) for each in sizes), Cost())
    assert cost.step(StepShape(9, 4, 0, 0))["adapters"] == Cost()


def test_low_rank_products() -> None:
    none, one, both = (
        low_rank_cost(tokens, number, 100, 60, 4, 2) for tokens, number in ((0, 2), (1, 0), (3, 2))
    )
    assert none == Cost(0, 2 * 2 * 4 * 160)
    assert one.flops == 2 * 4 * 160 + 60
    assert both == none + one * 3


def test_a_gpu_has_places_for_as_many_adapters_as_a_tenth_of_its_memory_holds() -> None:
    spec, stored = checkpoint("llama").spec, [*adapters("llama").values()]
    few, many = adapter_sizes(spec, stored), adapter_sizes(spec, stored * 10)
    assert few is not None
    assert many is not None
    assert (few.slot_values, many.count) == (many.slot_values, 30)
    assert few.slot_values == sum(p.width * max(16, *p.ranks) for p in few.products)
    size = many.slot_values * 2
    assert many.slots(21 * size, 2) == 20
    assert many.slots(31 * size, 2) is None
    assert many.slots(0, 2) == 8
    assert few.slots(0, 2) is None
    parts = EngineParts(adapter_sizes=many)
    gpu = Hardware("a GPU", "cuda", None, 210 * size)
    assert (parts.adapter_slots(gpu, 2), parts.adapter_bytes(gpu, 2)) == (20, 21 * size)
    larger = replace(gpu, memory_bytes=1 << 40)
    assert (parts.adapter_slots(larger, 2), parts.adapter_bytes(larger, 2)) == (None, 31 * size)
    here = replace(gpu, device="cpu")
    assert (parts.adapter_slots(here, 2), parts.adapter_bytes(here, 2)) == (None, many.values * 2)
