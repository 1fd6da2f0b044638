"""Finds the weights that a checkpoint stores in 4 or 8 bits with scales, and the weights that they stand for. No
torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from batchinfer.models.files.config_fields import shown
from batchinfer.models.files.weight_files import FLOAT_DTYPES, StoredTensor
from batchinfer_kernels.arithmetic import CodedForm

Format = Literal["mxfp4", "fp8"]
FORMATS: tuple[Format, ...] = get_args(Format)
KEY = "quantization_config"
FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
SCALE_DTYPES = (*FLOAT_DTYPES, "F8_E8M0")
PRODUCT_GROUP = 128  # inputs that share a scale where products are computed of quantised values
MXFP4_GROUP, MXFP4_BYTES = 32, 16  # values that share a scale, and the bytes that hold them
# Of a weight, its scales; of its module, those of activations, which stay as they are once weights are dequantised
_FP8_SCALES, _FP8_ACTIVATIONS = ("_scale_inv", "_scale"), ("input_scale", "activation_scale")
# Scales of attention for a quantised cache; a job's cache computes its own (docs/models.md)
_CACHE_SCALES = (".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".output_scale")
# What else calls weights in FP8 so, and how they may be scaled
_COMPRESSED, _FBGEMM, _STRATEGIES = "compressed-tensors", "fbgemm_fp8", ("tensor", "channel", "block")


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor of `shape` that is stored as two, its values and their scales. Those of FP8 hold for a `block` (rows,
    columns) of it each; None: one for all. `alone`: as in Packing."""

    format: Format
    values: str
    scales: str
    shape: tuple[int, ...]
    block: tuple[int, int] | None = None
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Packing:
    """How config.json says that weights are stored. `alone`: activations are not to be quantised."""

    format: Format
    block: tuple[int, int] | None
    alone: bool = False


@dataclass(slots=True)
class PackedTensors:
    """The packed tensors of a checkpoint by the names of the weights that they hold, the stored tensors that nothing
    reads, and what is wrong with them."""

    found: dict[str, PackedTensor] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    mistakes: list[str] = field(default_factory=list)

    @property
    def stored(self) -> set[str]:
        """The names that they are stored under."""
        return {name for each in self.found.values() for name in (each.values, each.scales)}

    def add(self, name: str, packed: PackedTensor, tensors: Mapping[str, StoredTensor], fits: bool) -> None:
        """Note a packed tensor, also one that does not fit: it would be reported again as an unexpected one."""
        self.found[name] = packed
        if not fits:
            infos = [(each, tensors[each].info) for each in (packed.values, packed.scales)]
            told = " and ".join(f"{each} {list(info.shape)} ({info.dtype})" for each, info in infos)
            self.mistakes.append(f"{told} are no weights of {packed.format} and their scales")


def packing_of(raw: Mapping[str, Any], mistakes: list[str]) -> Packing | None:
    """Return the packing that `quantization_config` states; None if weights are floats, or packed in an unsupported
    way."""
    stated = raw.get(KEY)
    if not stated:
        return None
    if not isinstance(stated, Mapping):
        mistakes.append(f"config.json: {KEY} is {shown(stated)}; wanted an object")
        return None
    method, block = stated.get("quant_method"), stated.get("weight_block_size")
    if method == _COMPRESSED:
        return _compressed(stated, mistakes)
    if method == _FBGEMM:
        return Packing("fp8", None)
    if method not in FORMATS:
        mistakes.append(
            f"config.json: {KEY}: weights quantized by quant_method {shown(method)} are not supported; float weights, "
            f"{', '.join((*FORMATS, _FBGEMM))} and {_COMPRESSED} of 8-bit floats are, with model.quantization: int8 "
            "where memory is short"
        )
        return None
    if block is not None and not _is_block(block):
        mistakes.append(
            f"config.json: {KEY}: weight_block_size is {shown(block)}; wanted two numbers above 0"
        )
        return None
    return Packing(cast(Format, method), None if block is None else (block[0], block[1]))


def _compressed(stated: Mapping[str, Any], mistakes: list[str]) -> Packing | None:
    """Return the packing of compressed-tensors, if all weights are dense 8-bit floats that are scaled in one way."""
    groups, sparse = stated.get("config_groups"), stated.get("sparsity_config")
    wrong = []
    if isinstance(sparse, Mapping) and sparse.get("format") not in (None, "dense"):
        wrong.append(f"sparsity_config.format is {shown(sparse['format'])}; wanted dense")
    if not isinstance(groups, Mapping) or not groups:
        wrong.append(f"config_groups is {shown(groups)}; wanted an object with a group or more")
        groups = {}
    blocks, alone = set(), False
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        weights = weights if isinstance(weights, Mapping) else {}
        kind = (weights.get("type"), weights.get("num_bits"), weights.get("symmetric", True))
        if kind != ("float", 8, True) or weights.get("strategy") not in _STRATEGIES:
            told = shown({key: weights.get(key) for key in ("type", "num_bits", "symmetric", "strategy")})
            wrong.append(f"weights of {name} are {told}; wanted float, 8, symmetric, one of {_STRATEGIES}")
            continue
        block = weights.get("block_structure") if weights["strategy"] == "block" else None
        if weights["strategy"] == "block" and not _is_block(block):
            wrong.append(f"block_structure of {name} is {shown(block)}; wanted two numbers above 0")
        blocks.add(None if block is None else tuple(block))
        alone = alone or not group.get("input_activations")
    if len(blocks) > 1:
        wrong.append("its groups have weights of different blocks; wanted the same for all")
    mistakes += [f"config.json: {KEY}: {_COMPRESSED}: {text}" for text in wrong]
    return None if wrong else Packing("fp8", cast("tuple[int, int] | None", blocks.pop()), alone)


def _is_block(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)


def packed_tensors(packing: Packing | None, tensors: Mapping[str, StoredTensor]) -> PackedTensors:
    """Return the tensors that are stored so; all others are stored as they are."""
    packed = PackedTensors()
    if packing is None:
        return packed
    if packing.format == "mxfp4":
        for name in tensors:
            _add_mxfp4(packed, name, tensors)
    else:
        for name, tensor in tensors.items():
            if tensor.info.dtype in FP8_DTYPES:
                _add_fp8(packed, name, tensors, packing)
        packed.unused.update(name for name in tensors if name.endswith(_CACHE_SCALES))
    return packed


def _add_mxfp4(packed: PackedTensors, values: str, tensors: Mapping[str, StoredTensor]) -> None:
    """Matrices (…, outputs, inputs), which stand for their transposes."""
    name = values.removesuffix("_blocks")
    scales = f"{name}_scales"
    if name == values or scales not in tensors:
        return
    stored, scale = tensors[values].info, tensors[scales].info
    *more, rows, groups = scale.shape if len(scale.shape) > 1 else (0, 0)
    right = stored.shape == (*scale.shape, MXFP4_BYTES) and stored.dtype == scale.dtype == "U8"
    right = right and name not in tensors
    shape = (*more, groups * MXFP4_GROUP, rows)
    packed.add(name, PackedTensor("mxfp4", values, scales, shape), tensors, right)


def _add_fp8(packed: PackedTensors, name: str, tensors: Mapping[str, StoredTensor], packing: Packing) -> None:
    scales = next((name + end for end in _FP8_SCALES if name + end in tensors), None)
    if scales is None:
        packed.mistakes.append(f"{name} is FP8, and its scales {name}{_FP8_SCALES[0]} are missing")
        return
    shape, scale = tensors[name].info.shape, tensors[scales].info
    fitting = _block_of(shape, scale.shape, packing.block)
    right = fitting is not None and scale.dtype in SCALE_DTYPES
    packed.add(name, PackedTensor("fp8", name, scales, shape, fitting or None, packing.alone), tensors, right)
    module = name.removesuffix("weight")
    packed.unused.update(found for end in _FP8_ACTIVATIONS if (found := module + end) in tensors)


def _block_of(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[int, int] | tuple[()] | None:
    """Return the shape of the block that a scale belongs to; () for the whole tensor; None if the scales do not fit."""
    if all(size == 1 for size in scales):
        return ()
    if len(shape) != 2:
        return None
    if scales in ((shape[0],), (shape[0], 1)):
        return 1, max(1, shape[1])
    if block is None or scales != (-(-shape[0] // block[0]), -(-shape[1] // block[1])):
        return None
    return block


def coded_form(packed: PackedTensor, dtype: str) -> CodedForm | None:
    """Return the form of the scales if products can be computed of the quantised values, which have this `dtype`;
    None if they have to be dequantised."""
    if packed.format != "fp8" or dtype != FP8_DTYPES[0] or len(packed.shape) != 2 or packed.alone:
        return None
    if packed.block is None or packed.block == (1, packed.shape[1]):
        return "channel"
    return "block" if packed.block[1] == PRODUCT_GROUP else None


def unpacked_shapes(
    packed: PackedTensors, tensors: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name → shape of all tensors once they are dequantised."""
    stored = packed.stored
    yield from ((name, tensor.info.shape) for name, tensor in tensors.items() if name not in stored)
    yield from ((name, each.shape) for name, each in packed.found.items())
