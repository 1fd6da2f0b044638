"""Tiny checkpoints in 4 and 8 bits with the names, shapes and keys of published ones.

The formats are AutoGPTQ, GPTQModel, AutoAWQ, llm-compressor, bitsandbytes and Model Optimizer. Each value is
packed separately, by its position in words: this code does not resemble batchinfer's unpacking.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.checkpoints import edit_json, kept_folder, make_checkpoint
from tests.packed_weights import SINGLE

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
Random = np.random.Generator
Tensors = dict[str, Tensor]
# Packs the matrix (N, K) of a module: the tensors by suffix of their names, and the dequantised values
Pack = Callable[[NDArray[np.float32], Random], tuple[Tensors, NDArray[np.float64]]]


@dataclass(frozen=True)
class Published:
    """A published format: its packing, its part of config.json, and the family that tests use."""

    pack: Pack
    config: Mapping[str, Any]
    family: str = "llama"
    kept: tuple[str, ...] = ("lm_head", "layers.0.self_attn.o_proj")  # modules that stay in floats
    sizes: Mapping[str, Any] = field(default_factory=dict)
    header: Mapping[str, Any] | None = None  # metadata of each quantised weight in the file's header


def words(codes: NDArray[Any], bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes [R, C] into int32 [R, ceil(C × bits / 32)], with code c of a word in the bits number
    `order[c]`."""
    held = 32 // bits
    rows, columns = codes.shape
    packed = np.zeros((rows, -(-columns // held)), np.uint64)
    for column in range(columns):
        place = column % held if order is None else order[column % held]
        shifted = codes[:, column].astype(np.uint64) << np.uint64(place * bits)
        packed[:, column // held] |= shifted
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


def codes_of(
    matrix: NDArray[np.float32], bits: int, groups: NDArray[np.int64], generator: Random
) -> tuple[NDArray[np.int64], NDArray[np.float16], NDArray[np.int64]]:
    """Return values [N, K], scales [N, G] and zero points [N, G]."""
    number, most = int(groups.max()) + 1, 2**bits - 1
    scales = np.zeros((len(matrix), number), np.float16)
    for group in range(number):
        part = matrix[:, groups == group]
        scales[:, group] = (part.max(1) - part.min(1)) / most + 1e-3
    zeros = generator.integers(0, most + 1, scales.shape)
    wide = matrix / scales.astype(np.float64)[:, groups] + zeros[:, groups]
    return np.clip(np.rint(wide), 0, most).astype(np.int64), scales, zeros


def values_of(
    codes: NDArray[np.int64], scales: NDArray[Any], zeros: NDArray[np.int64], groups: NDArray[np.int64]
) -> NDArray[np.float64]:
    found: NDArray[np.float64] = (codes - zeros[:, groups]) * scales.astype(np.float64)[:, groups]
    return found


def float16(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.float16))


def gptq(
    bits: int,
    group: int,
    less: int,
    ordered: bool = False,
    zeros: NDArray[np.int64] | int | None = None,
) -> Pack:
    """Return a packing like GPTQModel 7.7.0 (`pack_original`, then `convert_gptq_v2_to_v1_format_module`).

    Args:
        less: subtracted from each zero point, by one subtraction from the whole word.
        zeros: zero points, (N, G) or one for all; None to draw them.
    """

    def pack(matrix: NDArray[np.float32], generator: Random) -> tuple[Tensors, NDArray[np.float64]]:
        groups = np.arange(matrix.shape[1]) // (matrix.shape[1] if group == -1 else group)
        if ordered:
            generator.shuffle(groups)
        codes, scales, offsets = codes_of(matrix, bits, groups, generator)
        if zeros is not None:
            offsets = np.broadcast_to(zeros, offsets.shape)
        ones = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}[bits]
        tensors = {
            "qweight": words(codes, bits).t().contiguous(),
            "qzeros": words(offsets.T, bits) - less * ones,
            "scales": float16(scales.T),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return tensors, values_of(codes, scales, offsets, groups)

    return pack


def awq(group: int) -> Pack:
    order = tuple([0, 2, 4, 6, 1, 3, 5, 7].index(column) for column in range(8))

    def pack(matrix: NDArray[np.float32], generator: Random) -> tuple[Tensors, NDArray[np.float64]]:
        groups = np.arange(matrix.shape[1]) // group
        codes, scales, zeros = codes_of(matrix, 4, groups, generator)
        tensors = {
            "qweight": words(codes.T, 4, order),
            "qzeros": words(zeros.T, 4, order),
            "scales": float16(scales.T),
        }
        return tensors, values_of(codes, scales, zeros, groups)

    return pack


def pack_quantized(bits: int, group: int | None, zeros: bool = False, ordered: bool = False) -> Pack:
    def pack(matrix: NDArray[np.float32], generator: Random) -> tuple[Tensors, NDArray[np.float64]]:
        groups = np.arange(matrix.shape[1]) // (group or matrix.shape[1])
        if ordered:
            generator.shuffle(groups)
        codes, scales, offsets = codes_of(matrix, bits, groups, generator)
        if not zeros:
            offsets = np.full_like(offsets, 2 ** (bits - 1))
        tensors = {
            "weight_packed": words(codes, bits),
            "weight_scale": torch.from_numpy(scales.astype(np.float32)).bfloat16(),
            "weight_shape": torch.tensor(matrix.shape),
        }
        scales = tensors["weight_scale"].float().numpy()
        if zeros:
            tensors["weight_zero_point"] = words(offsets.T, bits).t().contiguous()
        if ordered:
            tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return tensors, values_of(codes, scales, offsets, groups)

    return pack


def int_quantized(matrix: NDArray[np.float32], generator: Random) -> tuple[Tensors, NDArray[np.float64]]:
    scales = np.abs(matrix).max(1, keepdims=True) / 127
    codes = np.rint(matrix / scales).astype(np.int8)
    tensors = {"weight": torch.from_numpy(codes), "weight_scale": torch.from_numpy(scales)}
    return tensors, codes * scales.astype(np.float64)


def sparse(style: str, quantised: bool = False) -> Pack:
    """Return compressed-tensors' sparse packing.

    Args:
        style: "24" stores two of four inputs, "any" any inputs, both with a bit per position; "dense" stores
            zeros.
        quantised: if True, values are FP8 with a scale per output.
    """

    def pack(matrix: NDArray[np.float32], generator: Random) -> tuple[Tensors, NDArray[np.float64]]:
        outputs, inputs = matrix.shape
        places = np.zeros(matrix.shape, bool)
        for output in range(outputs):
            for first in range(0, inputs, 4):
                chosen = (
                    generator.permutation(4)[:2]
                    if style != "any"
                    else np.flatnonzero(generator.integers(0, 2, 4))
                )
                places[output, first + chosen] = True
        values, more = torch.from_numpy(np.where(places, matrix, 0)).to(torch.bfloat16), Tensors()
        spread: NDArray[np.float64] = np.ones((outputs, 1))
        if quantised:
            scales = torch.from_numpy(np.abs(matrix).max(1, keepdims=True) / 448)
            more, spread = {"weight_scale": scales}, scales.double().numpy()
            values = (values.float() / scales).to(torch.float8_e4m3fn)
        found: NDArray[np.float64] = values.double().numpy() * spread
        if style == "dense":
            return {"weight": values}, found
        bits = np.zeros((outputs, -(-inputs // 8)), np.uint8)
        for output, place in zip(*np.nonzero(places), strict=True):
            bits[output, place // 8] |= 1 << (place % 8)
        kept = (
            values.view(torch.uint8)[torch.from_numpy(places)].view(values.dtype)
            if quantised
            else values[places]
        )
        counts = places.sum(1)
        shape = torch.tensor([[outputs], [inputs]]) if style == "24" else torch.tensor([outputs, inputs])
        if style == "any":
            more = {**more, "row_offsets": torch.from_numpy(np.cumsum(counts) - counts)}
        kept = kept.view(outputs, inputs // 2) if style == "24" else kept
        return {"compressed": kept, "bitmask": torch.from_numpy(bits), "shape": shape, **more}, found

    return pack


def float4(group: int, style: str) -> Pack:
    """Return the packing NVFP4 of compressed-tensors ("divided") or Model Optimizer ("multiplied"), or MXFP4
    ("power")."""

    def pack(matrix: NDArray[np.float32], generator: Random) -> tuple[Tensors, NDArray[np.float64]]:
        codes = generator.integers(0, 16, matrix.shape)
        halves = codes[:, 0::2] | codes[:, 1::2] << 4
        values = torch.from_numpy(halves.astype(np.uint8))
        shape = (len(matrix), matrix.shape[1] // group)
        if style == "power":
            exponents = generator.integers(119, 124, shape)
            spread = 2.0 ** (exponents - 127)
            tensors = {"weight_packed": values, "weight_scale": torch.from_numpy(exponents.astype(np.uint8))}
        else:
            stored = torch.from_numpy(generator.uniform(0.5, 2.0, shape)).to(torch.float8_e4m3fn)
            whole = 40.0 if style == "divided" else 0.025
            factor = 1 / 40.0 if style == "divided" else float(np.float32(0.025))
            spread = stored.double().numpy() * factor
            names = (
                ("weight_packed", "weight_global_scale")
                if style == "divided"
                else ("weight", "weight_scale_2")
            )
            one = torch.tensor([whole]) if style == "divided" else torch.tensor(whole)
            tensors = {names[0]: values, "weight_scale": stored, names[1]: one}
            tensors["input_global_scale" if style == "divided" else "input_scale"] = torch.tensor([3.0])
        return tensors, np.array(E2M1)[codes] * spread.repeat(group, 1)

    return pack


def bits4(kind: str, block: int, nested: bool) -> Pack:
    """Return bitsandbytes' packing of a flattened matrix.

    Args:
        nested: if True, scales are quantised, too.
    """

    def pack(matrix: NDArray[np.float32], generator: Random) -> tuple[Tensors, NDArray[np.float64]]:
        table = np.sort(generator.uniform(-1, 1, 16)).astype(np.float32)
        flat = matrix.reshape(-1)
        blocks = -(-len(flat) // block)
        largest = np.array(
            [np.abs(flat[i * block : (i + 1) * block]).max() for i in range(blocks)], np.float32
        )
        state: dict[str, Any] = {
            "quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(matrix.shape),
        }  # fmt: skip
        tensors: Tensors = {"weight.quant_map": torch.from_numpy(table)}
        if nested:
            offset, places = (
                float(np.float32(largest.mean())),
                generator.uniform(-1, 1, 256).astype(np.float32),
            )
            chosen = generator.integers(0, 256, blocks)
            again = np.full(-(-blocks // 8), 0.01, np.float32) * np.arange(
                1, -(-blocks // 8) + 1, dtype=np.float32
            )
            largest = places[chosen].astype(np.float64) * again.repeat(8)[:blocks] + offset
            state |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": offset}
            tensors |= {
                "weight.absmax": torch.from_numpy(chosen.astype(np.uint8)),
                "weight.nested_absmax": torch.from_numpy(again),
                "weight.nested_quant_map": torch.from_numpy(places),
            }
        else:
            tensors["weight.absmax"] = torch.from_numpy(largest)
        spread = np.repeat(largest.astype(np.float64), block)[: len(flat)]
        codes = np.abs((flat / spread)[:, None] - table[None]).argmin(1)
        tensors["weight"] = torch.from_numpy((codes[0::2] << 4 | codes[1::2]).astype(np.uint8))[:, None]
        text = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.from_numpy(text)
        return tensors, (table[codes] * spread).reshape(matrix.shape)

    return pack


def bits8(matrix: NDArray[np.float32], generator: Random) -> tuple[Tensors, NDArray[np.float64]]:
    largest = np.abs(matrix).max(1)
    codes = np.rint(matrix / largest[:, None] * 127).astype(np.int8)
    tensors = {
        "weight": torch.from_numpy(codes),
        "SCB": torch.from_numpy(largest),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, codes * (largest.astype(np.float64)[:, None] / 127)


def torchao_pairs(group: int) -> Pack:
    """Return a packing of two values per byte, the first one in the lower half, with float offsets."""

    def pack(matrix: NDArray[np.float32], generator: Random) -> tuple[Tensors, NDArray[np.float64]]:
        groups = np.arange(matrix.shape[1]) // group
        codes, scales, _ = codes_of(matrix, 4, groups, generator)
        signed = codes - 8
        offsets = generator.uniform(-0.1, 0.1, scales.shape).astype(np.float16)
        halves = (signed[:, 0::2] & 15) | (signed[:, 1::2] & 15) << 4
        tensors = {
            "_weight_qdata": torch.from_numpy(halves.astype(np.uint8).view(np.int8)),
            "_weight_scale": float16(scales.T),
            "_weight_zero_point": float16(offsets.T),
        }
        spread = scales.astype(np.float64).repeat(group, 1)
        return tensors, signed * spread + offsets.astype(np.float64).repeat(group, 1)

    return pack


def torchao_bytes(bits: int, group: int | None, zeros: bool = False) -> Pack:
    """Return a packing of one signed value per byte."""

    def pack(matrix: NDArray[np.float32], generator: Random) -> tuple[Tensors, NDArray[np.float64]]:
        groups = np.arange(matrix.shape[1]) // (group or matrix.shape[1])
        codes, scales, offsets = codes_of(matrix, bits, groups, generator)
        middle = 2 ** (bits - 1)
        if not zeros:
            offsets = np.full_like(offsets, middle)
        tensors = {
            "_weight_qdata": torch.from_numpy((codes - middle).astype(np.int8)),
            "_weight_scale": torch.from_numpy(scales.astype(np.float32)).bfloat16(),
        }
        tensors["_weight_zero_point"] = torch.from_numpy((offsets - middle).astype(np.int8))
        return tensors, values_of(codes, tensors["_weight_scale"].float().numpy(), offsets, groups)

    return pack


def torchao_fp8(matrix: NDArray[np.float32], _: Random) -> tuple[Tensors, NDArray[np.float64]]:
    scales = torch.from_numpy(np.abs(matrix).max(1, keepdims=True) / 448)
    values = (torch.from_numpy(matrix) / scales).to(torch.float8_e4m3fn)
    tensors = {"_weight_qdata": values, "_weight_scale": scales}
    return tensors, (values.double() * scales.double()).numpy()


def _torchao(kind: str, **data: Any) -> dict[str, Any]:
    return {"_type": kind, "_data": {"block_size": [1, 32], **data}}


def compressed(
    weights: Mapping[str, Any], layout: str, activations: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "ignore": ["lm_head"], "kv_cache_scheme": None, "config_groups": {"group_0": group},
    }  # fmt: skip


def sparsity(layout: str, structure: str = "2:4", **more: Any) -> dict[str, Any]:
    """Return the quantization_config of sparse weights.

    Args:
        more: keys of their quantisation.
    """
    stated = {
        "format": layout, "global_sparsity": 0.5, "ignore": ["lm_head", "model.layers.0.self_attn.o_proj"],
        "registry_requires_subclass": False, "sparsity_structure": structure, "targets": ["Linear"],
    }  # fmt: skip
    found = {"quant_method": "compressed-tensors", "version": "0.12.2", "transform_config": {}}
    return {**found, **more, "sparsity_config": stated}


def _integers(bits: int, group: int | None, symmetric: bool = True) -> dict[str, Any]:
    strategy = "channel" if group is None else "group"
    return {
        "num_bits": bits,
        "type": "int",
        "strategy": strategy,
        "symmetric": symmetric,
        "group_size": group,
    }


_GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "sym": False,
    "lm_head": False,
}
_AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": None,
}  # fmt: skip
_BNB = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
}
_TORCHAO = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}},
    "modules_to_not_convert": None,
}
_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}

PUBLISHED: Mapping[str, Published] = {
    "gptq": Published(gptq(4, 32, 1), {**_GPTQ, "damp_percent": 0.01, "true_sequential": True}),
    "gptq of 8 bits, desc_act, v2": Published(
        gptq(8, 32, 0, ordered=True),
        {**_GPTQ, "bits": 8, "desc_act": True, "checkpoint_format": "gptq_v2"},
        "phi3",
    ),
    "gptq without groups": Published(
        gptq(4, -1, 1, zeros=8), {**_GPTQ, "group_size": -1, "sym": True}, "mixtral"
    ),
    "awq": Published(awq(32), _AWQ, "qwen3_moe", sizes={"moe_intermediate_size": 32}),
    "w4a16": Published(pack_quantized(4, 32), compressed(_integers(4, 32), "pack-quantized"), "qwen3"),
    "w4a16 with zeros": Published(
        pack_quantized(4, 32, zeros=True), compressed(_integers(4, 32, symmetric=False), "pack-quantized")
    ),
    "w8a16, actorder": Published(
        pack_quantized(8, 16, ordered=True),
        compressed({**_integers(8, 16), "actorder": "group"}, "pack-quantized"),
    ),
    "w8a16 by channel": Published(
        pack_quantized(8, None), compressed(_integers(8, None), "pack-quantized"), "gemma2"
    ),
    "w8a8": Published(int_quantized, compressed(_integers(8, None), "int-quantized", _TOKENS), "qwen2"),
    "nvfp4": Published(
        float4(16, "divided"), compressed(_NVFP4, "nvfp4-pack-quantized", {**_NVFP4, "dynamic": "local"})
    ),
    "nvfp4 of modelopt": Published(
        float4(16, "multiplied"),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        "qwen3",
    ),
    "mxfp4 of linear layers": Published(float4(32, "power"), compressed(_MXFP4, "mxfp4-pack-quantized")),
    "2:4 sparse": Published(sparse("24"), sparsity("sparse-24-bitmask")),
    "sparse": Published(sparse("any"), sparsity("sparse-bitmask", "unstructured"), "qwen2"),
    "2:4 sparse fp8": Published(
        sparse("24", quantised=True),
        sparsity(
            "sparse-24-bitmask",
            **compressed(_FP8, "float-quantized", {**_FP8, "strategy": "token", "dynamic": True}),
        ),
        "qwen3",
    ),
    "nf4": Published(bits4("nf4", 64, nested=False), _BNB),
    "nf4, double": Published(
        bits4("nf4", 64, nested=True), {**_BNB, "bnb_4bit_use_double_quant": True}, "mistral"
    ),
    "fp4": Published(bits4("fp4", 128, nested=True), {**_BNB, "bnb_4bit_quant_type": "fp4"}, "granite"),
    "torchao int4": Published(torchao_pairs(32), _TORCHAO, header=_torchao("Int4Tensor", shape=[64, 64])),
    "torchao int8": Published(
        torchao_bytes(8, None), _TORCHAO, "qwen3", header=_torchao("Int8Tensor", act_quant_kwargs=None)
    ),
    "torchao w8a8": Published(
        torchao_bytes(8, None),
        _TORCHAO,
        header=_torchao("Int8Tensor", act_quant_kwargs={"_type": "QuantizeTensorToInt8Kwargs", "_data": {}}),
    ),
    "torchao int8 by group": Published(
        torchao_bytes(8, 16, zeros=True), _TORCHAO, header=_torchao("Int8Tensor")
    ),
    "torchao intx": Published(
        torchao_bytes(4, 32, zeros=True),
        _TORCHAO,
        header=_torchao("IntxUnpackedToInt8Tensor", target_dtype={"_type": "torch.dtype", "_data": "int4"}),
    ),
    "torchao fp8": Published(torchao_fp8, _TORCHAO, "qwen2", header=_torchao("Float8Tensor")),
    "int8 of bitsandbytes": Published(bits8, {**_BNB, "load_in_4bit": False, "load_in_8bit": True}),
}
_NEVER = ("norm", "embed_tokens", "mlp.gate.", "block_sparse_moe.gate.")


def make_published(folder: Path, plain: Path, name: str, **sizes: int) -> PreTrainedModel:
    """Write a quantised checkpoint to `folder` and its dequantised copy to `plain`; return transformers'
    model of the copy.

    Args:
        sizes: further keys of its config.
    """
    published, generator = PUBLISHED[name], np.random.default_rng(7)
    model = make_checkpoint(plain, published.family, **SIZES | dict(published.sizes) | sizes)
    stored, packed, header = load_file(plain / SINGLE), {}, {"format": "pt"}
    for tensor_name, tensor in stored.items():
        module = tensor_name.removesuffix("weight")
        apart = tensor.dim() != 2 or any(part in tensor_name for part in (*_NEVER, *published.kept))
        if apart or module == tensor_name:
            packed[tensor_name] = tensor
            continue
        tensors, values = published.pack(tensor.numpy(), generator)
        packed |= {module + end: each for end, each in tensors.items()}
        if published.header is not None:
            header[tensor_name] = json.dumps(published.header)
        stored[tensor_name] = torch.from_numpy(values).float()
    save_file(stored, plain / SINGLE, metadata={"format": "pt"})
    folder.mkdir(exist_ok=True, parents=True)
    for file in plain.iterdir():
        if file.name != SINGLE:
            (folder / file.name).write_bytes(file.read_bytes())
    edit_json(folder / "config.json", quantization_config=dict(published.config))
    if published.header is not None:
        header |= {name: '{"_type": "Tensor"}' for name in stored if name not in header}
        header["tensor_names"] = json.dumps([*stored])
    save_file(packed, folder / SINGLE, metadata=header)
    return type(model).from_pretrained(plain, attn_implementation="eager", dtype=torch.float32).eval()


@cache
def published(name: str) -> tuple[Path, PreTrainedModel]:
    """Return a folder with `packed` and `plain` of `make_published`, and the model. Tests may not change it."""
    folder = kept_folder()
    return folder, make_published(folder / "packed", folder / "plain", name)
