"""Which kinds of layers a model has, for those who may read its prompts."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.models.checkpoint.dummy import DummyWeights
from batchinfer.models.sources import ModelSource
from batchinfer.models.spec.spec import AttentionRules, AttentionSpec
from tests.model_costs import llama_spec


def test_layers_count_by_their_rules_and_the_codes_of_their_cache() -> None:
    plain = llama_spec(3, 64, 48, 4, 2, 16, 100)
    first = plain.layers[0]
    assert isinstance(first.attention, AttentionSpec)
    local = replace(first, attention=replace(first.attention, window=8, soft_cap=30.0))
    bare = replace(first, attention=None, input_norm=None)
    spec = replace(plain, layers=(*plain.layers, local, bare))
    for kept, codes in (("auto", None), ("int8", "int8"), ("fp8", "fp8")):
        cached = spec.caching(kept)
        source = ModelSource(cached, 0, lambda *place, spec=cached: DummyWeights(spec, *place))
        assert source.prompt_layers == {
            AttentionRules(codes=codes): 3,
            AttentionRules(8, 30.0, codes=codes): 1,
        }
