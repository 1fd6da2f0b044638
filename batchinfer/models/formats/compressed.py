"""compressed-tensors checkpoints, as llm-compressor writes them.

Each group of layers has 4-bit or 8-bit integers or floats. Weights may also be sparse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from batchinfer.models.files.config_fields import shown
from batchinfer.models.formats import mxfp4, sparse
from batchinfer.models.formats.encoded_tensor import EncodedTensors, Stored, StoredFormat
from batchinfer.models.formats.fp8 import CACHE_SCALES, DTYPES, add_fp8, is_block
from batchinfer.models.formats.integers import add_int8, add_packed_integers
from batchinfer.models.formats.nvfp4 import NVFP4_GROUP, add_nvfp4
from batchinfer.models.formats.packed_mxfp4 import add_packed_mxfp4

NAME = "compressed-tensors"
# For each type and number of bits of weights, the supported granularities of scales
_STRATEGIES: Mapping[tuple[str, int], tuple[str, ...]] = {
    ("float", 8): ("tensor", "channel", "block"),
    ("float", 4): ("tensor_group", "group"),
    ("int", 8): ("tensor", "channel", "group"),
    ("int", 4): ("tensor", "channel", "group"),
}
_FLOAT4_GROUPS = {"tensor_group": NVFP4_GROUP, "group": mxfp4.GROUP}
# A layout for one GPU kernel, which compressed-tensors cannot convert back
_UNREAD = "marlin-24"
# Rotations that the stored weights already include. Other rotations apply to activations while the model runs.
_IN_WEIGHTS = ("weight_input", "weight_output")


@dataclass(frozen=True, slots=True)
class CompressedFormat(StoredFormat):
    """The format of compressed-tensors checkpoints, which finds their quantised and sparse weights.

    The tensors that a weight has show its layout.

    Attributes:
        bits: The possible numbers of bits of packed integers.
        block: Rows and columns that share an FP8 scale. None: no layer has scales per block.
        alone: True if some of the weights with 8 bits must be multiplied with unquantised activations.
        dense_but: The modules whose weights are not sparse, if all other float weights are 2:4 sparse and stored with
            their zeros. None: no weight is stored in this way.
    """

    bits: tuple[int, ...]
    block: tuple[int, int] | None
    alone: bool
    dense_but: frozenset[str] | None = None

    def find(self, tensors: Stored) -> EncodedTensors:
        """Return the quantised and sparse weights among a checkpoint's tensors."""
        encoded = EncodedTensors()
        whole, masked = sparse.fill_masked(tensors, encoded)
        self._find(encoded, whole)
        sparse.add_masked(encoded, masked, whole)
        if self.dense_but is not None:
            sparse.add_halves(encoded, tensors, [*sparse.sparse_modules(tensors, self.dense_but)])
        return encoded

    def _find(self, encoded: EncodedTensors, tensors: Stored) -> None:
        for name, tensor in tensors.items():
            if name.endswith(".weight_packed"):
                self._add_packed(encoded, name, tensors)
            elif tensor.info.dtype in DTYPES and name.endswith("weight"):
                add_fp8(encoded, name, tensors, self.block, self.alone)
            elif tensor.info.dtype == "I8" and name.endswith(".weight"):
                add_int8(encoded, name, tensors, self.alone)
        encoded.unused.update(
            name for name in tensors if name.endswith((*CACHE_SCALES, ".input_global_scale"))
        )

    def _add_packed(self, encoded: EncodedTensors, name: str, tensors: Stored) -> None:
        module = name.removesuffix("weight_packed")
        if tensors[name].info.dtype == "I32":
            add_packed_integers(encoded, module, tensors, self.bits)
        elif module + "weight_global_scale" in tensors:
            add_nvfp4(encoded, module, tensors, "weight_packed", "weight_global_scale", divided=True)
        else:
            add_packed_mxfp4(encoded, module, tensors)


def compressed_format(stated: Mapping[str, Any], mistakes: list[str]) -> StoredFormat | None:
    """Parse a `quantization_config` with `quant_method: compressed-tensors`.

    Args:
        stated: The `quantization_config` of config.json.
        mistakes: Receives a message for each unsupported layout or group of layers.

    Returns:
        The format; None if anything is unsupported.
    """
    wrong = list(_wrong_layout(stated))
    groups, sparsity = stated.get("config_groups"), stated.get("sparsity_config")
    if not groups and isinstance(sparsity, Mapping):  # its weights are floats
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
                yield f"transform {shown(name)} is of {shown(where)}; wanted {' or '.join(_IN_WEIGHTS)}"


def _wrong_weights(name: str, weights: Mapping[str, Any]) -> Iterator[str]:
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
