"""compressed-tensors, as llm-compressor writes it: groups of layers, each with integers or floats of 4 or 8 bits, and
weights that have zeros in the place of most values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from batchinfer.models.files.config_fields import shown
from batchinfer.models.formats import mxfp4, sparse
from batchinfer.models.formats.fp8 import CACHE_SCALES, DTYPES, add_fp8, is_block
from batchinfer.models.formats.integers import add_int8, add_packed_integers
from batchinfer.models.formats.nvfp4 import NVFP4_GROUP, add_nvfp4
from batchinfer.models.formats.packed_mxfp4 import add_packed_mxfp4
from batchinfer.models.formats.packed_tensor import PackedTensors, Stored, StoredFormat

NAME = "compressed-tensors"
# By the type and the bits of weights, how they may be scaled, and of how many inputs groups are that say so
_STRATEGIES: Mapping[tuple[str, int], tuple[str, ...]] = {
    ("float", 8): ("tensor", "channel", "block"),
    ("float", 4): ("tensor_group", "group"),
    ("int", 8): ("tensor", "channel", "group"),
    ("int", 4): ("tensor", "channel", "group"),
}
_FLOAT4_GROUPS = {"tensor_group": NVFP4_GROUP, "group": mxfp4.GROUP}
# The words of one GPU kernel, in an order which compressed-tensors itself does not undo
_UNREAD = "marlin-24"
# Rotations that the stored weights have already; others are of activations, while the model runs
_IN_WEIGHTS = ("weight_input", "weight_output")


@dataclass(frozen=True, slots=True)
class CompressedFormat(StoredFormat):
    """Weights of compressed-tensors; which of its layouts a weight has is seen by its tensors. `bits`: that packed
    integers may have. `block`: of FP8, as in Fp8Format. `alone`: activations are not to be quantised beside some of the
    weights in 8 bits. `dense_but`: weights in floats have two zeros in each four inputs, but those of these modules;
    None: nothing is said of that."""

    bits: tuple[int, ...]
    block: tuple[int, int] | None
    alone: bool
    dense_but: frozenset[str] | None = None

    def find(self, tensors: Stored) -> PackedTensors:
        packed = PackedTensors()
        whole, masked = sparse.filled(tensors, packed)
        self._find(packed, whole)
        sparse.add_masked(packed, masked, whole)
        if self.dense_but is not None:
            sparse.add_halves(packed, tensors, [*sparse.sparse_modules(tensors, self.dense_but)])
        return packed

    def _find(self, packed: PackedTensors, tensors: Stored) -> None:
        """Note the quantised weights."""
        for name, tensor in tensors.items():
            if name.endswith(".weight_packed"):
                self._add_packed(packed, name, tensors)
            elif tensor.info.dtype in DTYPES and name.endswith("weight"):
                add_fp8(packed, name, tensors, self.block, self.alone)
            elif tensor.info.dtype == "I8" and name.endswith(".weight"):
                add_int8(packed, name, tensors, self.alone)
        packed.unused.update(
            name for name in tensors if name.endswith((*CACHE_SCALES, ".input_global_scale"))
        )

    def _add_packed(self, packed: PackedTensors, name: str, tensors: Stored) -> None:
        module = name.removesuffix("weight_packed")
        if tensors[name].info.dtype == "I32":
            add_packed_integers(packed, module, tensors, self.bits)
        elif module + "weight_global_scale" in tensors:
            add_nvfp4(packed, module, tensors, "weight_packed", "weight_global_scale", divided=True)
        else:
            add_packed_mxfp4(packed, module, tensors)


def compressed_format(stated: Mapping[str, Any], mistakes: list[str]) -> StoredFormat | None:
    """Return the format of `quant_method: compressed-tensors`, if all groups have weights that are read."""
    wrong = list(_wrong_layout(stated))
    groups, sparsity = stated.get("config_groups"), stated.get("sparsity_config")
    if not groups and isinstance(sparsity, Mapping):  # its weights are in floats
        groups = {}
    elif not isinstance(groups, Mapping) or not groups:
        wrong.append(f"config_groups is {shown(groups)}; wanted an object with a group or more")
        groups = {}
    bits, blocks, alone = set(), set(), False
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        weights = weights if isinstance(weights, Mapping) else {}
        mistaken = list(_wrong_weights(name, weights))
        wrong += mistaken
        if mistaken:
            continue
        if weights["type"] == "int":
            bits.add(weights["num_bits"])
        elif weights["num_bits"] == 8:
            block = weights.get("block_structure") if weights["strategy"] == "block" else None
            blocks.add(None if block is None else (block[0], block[1]))
        alone = alone or (weights["num_bits"] == 8 and not group.get("input_activations"))
    if len(blocks) > 1:
        wrong.append("its groups have weights of different blocks; wanted the same for all")
    mistakes += [f"{NAME}: {text}" for text in wrong]
    if wrong:
        return None
    return CompressedFormat(tuple(sorted(bits)), next(iter(blocks), None), alone, _dense_but(sparsity))


def _dense_but(sparsity: object) -> frozenset[str] | None:
    """Return the modules that are left out where weights are stored with their zeros, which are two of each four."""
    if not isinstance(sparsity, Mapping) or sparsity.get("sparsity_structure") != sparse.HALF_STRUCTURE:
        return None
    left_out = sparsity.get("ignore")
    return (
        frozenset(name for name in left_out if isinstance(name, str))
        if isinstance(left_out, list)
        else frozenset()
    )


def _wrong_layout(stated: Mapping[str, Any]) -> Iterator[str]:
    sparsity, layout = stated.get("sparsity_config"), stated.get("format")
    held = sparsity.get("format") if isinstance(sparsity, Mapping) else None
    if held not in (None, *sparse.LAYOUTS):
        yield f"sparsity_config.format is {shown(held)}; wanted one of {', '.join(sparse.LAYOUTS)}"
    if layout == _UNREAD:
        why = "its words are in the order of one GPU kernel, and compressed-tensors publishes no way back"
        yield f"format is {shown(layout)}: {why}; wanted another checkpoint of this model"
    transforms = stated.get("transform_config")
    schemes = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
    for name, scheme in schemes.items() if isinstance(schemes, Mapping) else ():
        places = scheme.get("apply") if isinstance(scheme, Mapping) else None
        for place in places if isinstance(places, list) else ():
            where = place.get("location") if isinstance(place, Mapping) else None
            if where not in _IN_WEIGHTS:
                yield f"transform {shown(name)} is of {shown(where)}; wanted only those that are in the weights"


def _wrong_weights(name: str, weights: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the weights of a group are not read."""
    kind, strategy = (str(weights.get("type")), weights.get("num_bits")), weights.get("strategy")
    fitting = _STRATEGIES.get((kind[0], kind[1])) if isinstance(kind[1], int) else None
    symmetric = weights.get("symmetric", True)
    if fitting is None or strategy not in fitting or (kind[0] == "float" and symmetric is not True):
        told = shown({key: weights.get(key) for key in ("type", "num_bits", "symmetric", "strategy")})
        wanted = "; ".join(
            f"{bits}-bit {type} by {', '.join(by)}" for (type, bits), by in _STRATEGIES.items()
        )
        yield f"weights of {name} are {told}; wanted {wanted} (floats symmetric)"
        return
    group, of = weights.get("group_size"), _FLOAT4_GROUPS.get(strategy) if kind == ("float", 4) else None
    if of is not None and group not in (None, of):
        yield f"group_size of {name} is {shown(group)}; wanted {of} for floats of 4 bits by {strategy}"
    if strategy == "block" and not is_block(weights.get("block_structure")):
        yield f"block_structure of {name} is {shown(weights.get('block_structure'))}; wanted two numbers above 0"
