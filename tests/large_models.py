"""Checkpoints with the shapes of large models, without weights: sparse files, which take no disk space."""

from __future__ import annotations

import json
import math
from pathlib import Path

from batchinfer.models.files.safetensors_header import PREFIX_BYTES
from tests.checkpoints import make_tokenizer

LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def hollow_checkpoint(folder: Path, **changes: int) -> Path:
    """Write a Llama of the shape of a 70B model, with zero weights.

    Args:
        changes: changes of its configuration.
    """
    folder.mkdir(parents=True)
    config = LLAMA_70B | changes
    (folder / "config.json").write_text(json.dumps(config))
    make_tokenizer(folder)
    header, end = {}, 0
    for name, shape in _llama_shapes(config).items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(PREFIX_BYTES, "little") + text)
        file.truncate(PREFIX_BYTES + len(text) + end)
    return folder


def _llama_shapes(config: dict[str, object]) -> dict[str, list[int]]:
    hidden, inner, heads, kv_heads, vocab, layers = (
        int(str(config[name]))
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                     "vocab_size", "num_hidden_layers")
    )  # fmt: skip
    kv_width = hidden // heads * kv_heads
    found = {"model.embed_tokens.weight": [vocab, hidden], "lm_head.weight": [vocab, hidden]}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        found |= {
            at + "self_attn.q_proj.weight": [hidden, hidden],
            at + "self_attn.k_proj.weight": [kv_width, hidden],
            at + "self_attn.v_proj.weight": [kv_width, hidden],
            at + "self_attn.o_proj.weight": [hidden, hidden],
            at + "mlp.gate_proj.weight": [inner, hidden],
            at + "mlp.up_proj.weight": [inner, hidden],
            at + "mlp.down_proj.weight": [hidden, inner],
            at + "input_layernorm.weight": [hidden],
            at + "post_attention_layernorm.weight": [hidden],
        }
    return found | {"model.norm.weight": [hidden]}
