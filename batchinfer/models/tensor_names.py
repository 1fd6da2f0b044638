"""The tensors that a checkpoint must hold, by Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from batchinfer.models.families.registry import FAMILIES
from batchinfer.models.parameters import BIAS, Shape, layer_parameters
from batchinfer.models.spec import ModelSpec

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
FINAL_NORM = "norm.weight"
BASE_PREFIX = "model."
IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a buffer that old Llama checkpoints saved; it is computed


def prefix_of(names: Iterable[str]) -> str:
    """ "model." when the tensors are named so (a causal model was saved), "" when only the base model was."""
    return BASE_PREFIX if any(name.startswith(BASE_PREFIX) for name in names) else ""


def layer_names(spec: ModelSpec, index: int, prefix: str) -> Mapping[str, str]:
    """Parameter of the layer → the tensor that holds it."""
    modules, start = FAMILIES[spec.family].modules, f"{prefix}layers.{index}."
    return {
        name: start + modules[name.removesuffix(BIAS)] + (BIAS if name.endswith(BIAS) else ".weight")
        for name in layer_parameters(spec.layers[index])
    }


def expected_shapes(spec: ModelSpec, prefix: str) -> dict[str, Shape]:
    """Name → shape of every tensor; a tied checkpoint may leave out the head or the embedding."""
    table = (spec.vocab, spec.hidden)
    shapes: dict[str, Shape] = {prefix + EMBEDDING: table, HEAD: table}
    for index, layer in enumerate(spec.layers):
        names = layer_names(spec, index, prefix)
        shapes.update({names[name]: shape for name, shape in layer_parameters(layer).items()})
    shapes[prefix + FINAL_NORM] = (spec.final_norm.width,)
    return shapes
