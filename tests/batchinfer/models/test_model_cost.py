"""What is done to values beside the products is counted, too."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.models.spec.model_cost import model_cost
from batchinfer_kernels.cost import Cost, StepShape, step_total
from tests.model_costs import llama_spec

HIDDEN, VOCAB, LAYERS = 64, 100, 3


def test_multipliers_and_caps_are_counted() -> None:
    """Those of Granite and Gemma: of embeddings, of both halves of each layer, of logits."""
    plain = llama_spec(LAYERS, HIDDEN, 48, 4, 2, 16, VOCAB)
    layers = tuple(replace(layer, residual_multiplier=0.22) for layer in plain.layers)
    spec = replace(plain, layers=layers, embedding_multiplier=12.0, logit_multiplier=0.1, logit_cap=30.0)
    step = StepShape(tokens=7, sampled=2, pairs=0, kv_tokens=0)
    more = step_total(model_cost(spec, 2).step(step)) - step_total(model_cost(plain, 2).step(step))
    hidden, logits = (1 + 2 * LAYERS) * 7 * HIDDEN, 2 * VOCAB
    assert more == Cost(hidden + (1 + 3) * logits, 2 * 2 * hidden + 2 * 2 * 4 * logits)
    bare = replace(layers[0], attention=None, input_norm=None)
    found = model_cost(replace(spec, layers=(*layers, bare)), 2).step(step)["residual_multiplier"]
    assert found.flops == (1 + 2 * LAYERS) * 7 * HIDDEN
