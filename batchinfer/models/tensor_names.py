"""The tensors that a checkpoint must hold, by Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from batchinfer.models.families.registry import FAMILIES
from batchinfer.models.parameters import BIAS, Shape, layer_parameters
from batchinfer.models.spec import ModelSpec

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
FINAL_NORM, FINAL_NORM_BIAS = "norm.weight", "norm.bias"
BASE_PREFIX = "model."
IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a buffer that old Llama checkpoints saved; it is computed


def prefix_of(names: Iterable[str]) -> str:
    """ "model." when the tensors are named so (a causal model was saved), "" when only the base model was."""
    return BASE_PREFIX if any(name.startswith(BASE_PREFIX) for name in names) else ""


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """A tensor of a checkpoint and which of its rows are the parameter; None: all."""

    tensor: str
    rows: tuple[int, int] | None = None


def layer_names(spec: ModelSpec, index: int, prefix: str) -> dict[str, StoredParameter]:
    """Parameter of the layer → where it is stored."""
    layer = spec.layers[index]
    modules, start = FAMILIES[spec.family].modules(layer), f"{prefix}layers.{index}."
    found = {}
    for name in layer_parameters(layer):
        module, suffix = modules[name.removesuffix(BIAS)], BIAS if name.endswith(BIAS) else ".weight"
        if isinstance(module, str):
            found[name] = StoredParameter(start + module + suffix)
        else:
            found[name] = StoredParameter(start + module.module + suffix, (module.start, module.stop))
    return found


def expected_shapes(spec: ModelSpec, prefix: str) -> dict[str, Shape]:
    """Name → shape of every tensor; a tied checkpoint may leave out the head or the embedding."""
    table = (spec.vocab, spec.hidden)
    shapes: dict[str, Shape] = {prefix + EMBEDDING: table, HEAD: table}
    for index, layer in enumerate(spec.layers):
        names = layer_names(spec, index, prefix)
        for parameter, shape in layer_parameters(layer).items():
            stored = names[parameter]
            rows = shape[0] if stored.rows is None else stored.rows[1]
            known = shapes.get(stored.tensor, (0,))
            shapes[stored.tensor] = (max(rows, known[0]), *shape[1:])
    shapes[prefix + FINAL_NORM] = (spec.final_norm.width,)
    if spec.final_norm.biased:
        shapes[prefix + FINAL_NORM_BIAS] = (spec.final_norm.width,)
    return shapes
