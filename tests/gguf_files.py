"""Writes tiny GGUF files like llama.cpp's converter.

The names of tensors, blocks and values come from llama.cpp's package `gguf`. The changes of weights and the
keys are reimplemented here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.checkpoints import make_checkpoint
from tests.packed_weights import SINGLE

SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "initializer_range": 0.08,
}  # fmt: skip
# Offsets of float16 scales in blocks that the package cannot quantise
_SCALES = {Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,),
           Type.IQ4_NL: (0,), Type.IQ4_XS: (0,)}  # fmt: skip
_CONFIG = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
}
Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class Arch:
    """The name of a family in llama.cpp, and the converter's changes to the family's weights."""

    name: str
    pairs: bool = False
    norms: float = 0.0
    special: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)


ARCHS: Mapping[str, Arch] = {
    "llama": Arch("llama", pairs=True),
    "mixtral": Arch("llama", pairs=True),
    "qwen2": Arch("qwen2"),
    "qwen3": Arch("qwen3"),
    "qwen2_moe": Arch(
        "qwen2moe", special={"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    ),
    "qwen3_moe": Arch("qwen3moe", special={"moe_intermediate_size": 256, "norm_topk_prob": True}),
    "gemma": Arch("gemma", norms=1.0, special={"tied": True}),
    "gemma2": Arch("gemma2", norms=1.0, special={"query_pre_attn_scalar": 64, "tied": True}),
    "gemma3_text": Arch(
        "gemma3",
        norms=1.0,
        special={"query_pre_attn_scalar": 64, "tied": True},
        keys={"attention.sliding_window_pattern": 2, "rope.freq_base_swa": 10_000.0},
    ),
    "phi3": Arch("phi3"),
    "granite": Arch("granite", pairs=True),
    "olmo2": Arch("olmo2"),
    "gpt_oss": Arch("gpt-oss"),
    "cohere": Arch("command-r", special={"initializer_range": 0.2, "tied": True}),
    "cohere2": Arch("cohere2", special={"sliding_window_pattern": 4, "num_hidden_layers": 4, "tied": True}),
}


def make_gguf(
    file: Path,
    plain: Path,
    family: str,
    types: Sequence[Type] = (Type.F32,),
    *,
    shards: int = 1,
    metadata: Mapping[str, Any] | None = None,
    factors: Mapping[str, Sequence[float]] | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Write a GGUF model and its dequantised checkpoint in `plain`; return transformers' model of the copy.

    Args:
        types: types of the matrices in turn.
        metadata: further keys; None removes one.
        factors: tensors of the rotation.
    """
    arch, rng = ARCHS[family], np.random.default_rng(11)
    model = make_checkpoint(plain, family, **{**SIZES, **arch.special, **options})
    stored = {name: tensor.numpy() for name, tensor in load_file(plain / SINGLE).items()}
    writer = GGUFWriter(file, arch.name, split_max_tensors=-(-len(stored) // shards) if shards > 1 else 0)
    keys = {**_stated(model.config, arch), **(metadata or {})}
    for key, value in keys.items():
        if value is not None:
            add_key(
                writer, key if key.startswith(("general.", "tokenizer.")) else f"{arch.name}.{key}", value
            )
    matrices = 0
    for name, (tensor, back) in _converted(stored, arch, model.config).items():
        matrix = tensor.ndim > 1 and not name.endswith(("norm.weight", "bias"))
        kind = types[matrices % len(types)] if matrix else Type.F32
        matrices += matrix
        blocks, values = _blocks(tensor, kind, rng)
        writer.add_tensor(name, blocks, raw_dtype=kind)
        back(values)
    for name, numbers in (factors or {}).items():
        writer.add_tensor(name, np.array(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file({k: torch.from_numpy(v) for k, v in stored.items()}, plain / SINGLE, metadata={"format": "pt"})
    return type(model).from_pretrained(plain, attn_implementation="eager", dtype=torch.float32).eval()


def _stated(config: Any, arch: Arch) -> dict[str, Any]:
    found = {theirs: getattr(config, ours) for ours, theirs in _CONFIG.items() if hasattr(config, ours)}
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found |= {"attention.key_length": head, "attention.value_length": head, "rope.dimension_count": head}
    found |= {"rope.freq_base": rope["rope_theta"]}
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if "original_max_position_embeddings" in rope:
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return {**found, **arch.keys}


def add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    add: Callable[[str, Any], None]
    if isinstance(value, list):
        add = writer.add_array
    elif isinstance(value, str):
        add = writer.add_string
    elif isinstance(value, bool):
        add = writer.add_bool
    else:
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
    add(key, value)


def _converted(
    stored: dict[str, Matrix], arch: Arch, config: Any
) -> dict[str, tuple[Matrix, Callable[[Matrix], None]]]:
    """Return tensors by their names in GGUF, each with a function that puts its values back into `stored`."""
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == arch.name)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found: dict[str, tuple[Matrix, Callable[[Matrix], None]]] = {}
    experts: dict[str, list[str]] = {}
    for name, tensor in stored.items():
        module, end = name.rpartition(".")[::2]
        if arch.name == "gpt-oss" and (module.endswith("experts") or end == "sinks"):
            found |= _of_gpt_oss(stored, name)
            continue
        if ".experts." in module:
            before, _, numbered = module.partition(".experts.")
            theirs = names.get_name(f"{before}.experts.{numbered.partition('.')[2]}")
            experts.setdefault(f"{theirs}.{end}", []).append(name)
            continue
        theirs = names.get_name(module)
        assert theirs, name
        count = heads.get(module.rpartition(".")[2], 0) if arch.pairs else 0
        more = arch.norms if "norm" in module else 0.0
        found[f"{theirs}.{end}"] = _changed(stored, name, tensor, count, more)
    for theirs, each in experts.items():
        found[theirs] = _stacked(stored, sorted(each, key=_number))
    return found


def _of_gpt_oss(stored: dict[str, Matrix], name: str) -> dict[str, tuple[Matrix, Callable[[Matrix], None]]]:
    """Return experts in one tensor, with transposed matrices and interleaved outputs of gate and up."""
    start = f"blk.{name.split('.')[2]}."
    whole, biased = stored[name], name.endswith("_bias")
    if name.endswith("sinks"):
        return {f"{start}attn_sinks.weight": _changed(stored, name, whole, 0, 0.0)}

    def part(of: slice) -> tuple[Matrix, Callable[[Matrix], None]]:
        def back(values: Matrix) -> None:
            stored[name][..., of] = values if biased else values.swapaxes(1, 2)

        found = whole[..., of]
        return np.ascontiguousarray(found if biased else found.swapaxes(1, 2)), back

    end = "bias" if biased else "weight"
    if "down_proj" in name:
        return {f"{start}ffn_down_exps.{end}": part(slice(None))}
    return {
        f"{start}ffn_{proj}_exps.{end}": part(slice(at, None, 2)) for at, proj in enumerate(("gate", "up"))
    }


def _number(name: str) -> int:
    return int(name.partition(".experts.")[2].partition(".")[0])


def _changed(
    stored: dict[str, Matrix], name: str, tensor: Matrix, heads: int, more: float
) -> tuple[Matrix, Callable[[Matrix], None]]:
    rest = tensor.shape[1:]

    def back(values: Matrix) -> None:
        if heads:
            values = values.reshape(heads, -1, 2, *rest).swapaxes(1, 2).reshape(tensor.shape)
        stored[name] = np.ascontiguousarray((values - np.float32(more)).reshape(tensor.shape))

    changed = tensor
    if heads:
        changed = tensor.reshape(heads, 2, -1, *rest).swapaxes(1, 2).reshape(tensor.shape)
    if name.endswith("shared_expert_gate.weight"):
        changed = changed.reshape(-1)
    return np.ascontiguousarray(changed + np.float32(more)), back


def _stacked(stored: dict[str, Matrix], names: list[str]) -> tuple[Matrix, Callable[[Matrix], None]]:
    def back(values: Matrix) -> None:
        stored.update({name: np.ascontiguousarray(value) for name, value in zip(names, values, strict=True)})

    return np.stack([stored[name] for name in names]), back


def _blocks(tensor: Matrix, kind: Type, rng: np.random.Generator) -> tuple[NDArray[Any], Matrix]:
    """Return the blocks of a tensor and their dequantised values.

    If the package cannot quantise to the type, the blocks are random, with values of similar size.
    """
    if kind not in _SCALES:
        blocks = gguf.quantize(tensor, kind)
        return blocks, np.array(gguf.dequantize(blocks, kind)).reshape(tensor.shape)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (tensor.size // values, size)).astype(np.uint8)
    shape = (*tensor.shape[:-1], tensor.shape[-1] // values * size)
    one = _scaled(blocks, kind, np.ones(len(blocks)))
    spread = rng.uniform(0.5, 1.5, len(blocks)) * tensor.std() / gguf.dequantize(one, kind).std()
    blocks = _scaled(blocks, kind, spread).reshape(shape)
    return blocks, np.array(gguf.dequantize(blocks, kind)).reshape(tensor.shape)


def _scaled(blocks: NDArray[np.uint8], kind: Type, scales: NDArray[Any]) -> NDArray[np.uint8]:
    blocks = blocks.copy()
    for at in _SCALES[kind]:
        blocks[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    return blocks


def tokenizer_keys(fast: Any, kind: str = "gpt2", pre: str | None = "gpt-2") -> dict[str, Any]:
    """Return llama.cpp's keys of a tokenizer whose tokens are merged bytes or pieces."""
    model, added = json.loads(fast.backend_tokenizer.to_str())["model"], fast.added_tokens_decoder
    tokens = sorted(fast.get_vocab(), key=fast.get_vocab().__getitem__)
    types = [(added[n].special and 3) or 4 if n in added else 1 for n in range(len(tokens))]
    found = {
        "model": kind,
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": [" ".join(merge) for merge in model["merges"]] or None,
        "bos_token_id": fast.bos_token_id,
        "eos_token_id": fast.eos_token_id,
        "add_bos_token": False,
    }
    return {
        **{f"tokenizer.ggml.{key}": value for key, value in found.items()},
        "tokenizer.chat_template": fast.chat_template,
    }
