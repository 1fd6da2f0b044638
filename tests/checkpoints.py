"""Tiny random checkpoints and a byte-level tokenizer, saved by transformers."""

from __future__ import annotations

import atexit
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

FAMILIES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "granite", "olmo2", "phi3"),
    *("stablelm", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "gpt2", "gpt_neox", "gpt_oss"),
    *("deepseek_v2", "deepseek_v3"),
)
HEADS_FILL_HIDDEN = ("stablelm", "cohere2", "gpt2", "gpt_neox")  # families that know no head_dim
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3")  # heads of K and V are made of one latent
NO_KV_HEADS = ("gpt2", "gpt_neox")  # families whose query heads have a KV head each
# Names of a family's options that differ from other families; None if it has no such option
RENAMED: dict[str, dict[str, str | None]] = {
    "gpt2": {
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "rope_parameters": None,
    },
    "deepseek_v2": {"head_dim": None},
    "deepseek_v3": {"head_dim": None},
}
LATENT = {
    "moe_intermediate_size": 24,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
# Options of a family's checkpoints that make its differences from a Llama visible
SPECIAL: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 36,
    },
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "stablelm": {"partial_rotary_factor": 1.0},
    "gemma2": {"sliding_window": 40, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 40, "query_pre_attn_scalar": 20, "sliding_window_pattern": 2},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.3},
    "cohere2": {"sliding_window": 40, "sliding_window_pattern": 2, "logit_scale": 0.6},
    "gpt_neox": {"rotary_pct": 1.0},
    "gpt_oss": {"sliding_window": 40, "num_local_experts": 5, "num_experts_per_tok": 2},
    "deepseek_v2": {
        **LATENT,
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        **LATENT,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
    },
    "granite": {
        "attention_multiplier": 0.4,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "logits_scaling": 2.5,
    },
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.5,
        "mscale_all_dim": 0.7,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
    },
}
# For heads of 12 values, all rotated
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 50,
    "short_factor": [1.0, 1.1, 1.3, 1.0, 2.0, 1.7],
    "long_factor": [1.5, 2.0, 3.5, 5.0, 9.0, 20.0],
}
# Not for every family: a part of each head is rotated
PARTIAL_ROPES: dict[str, dict[str, Any]] = {
    f"partial-{part}": {**ROPES["default"], "partial_rotary_factor": part} for part in (0.25, 0.5, 0.75)
}
BOS, EOS, IM_START, PAD = 256, 257, 258, 259  # the byte-level tokenizer's specials, after its 256 bytes
VOCAB = 260
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


KEPT = "batchinfer-tests-"


def kept_folder() -> Path:
    """Return a new folder for several tests, which is removed when this process exits."""
    folder = Path(mkdtemp(prefix=f"{KEPT}{os.getpid()}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def remove_kept() -> None:
    """Remove the folders of this process, also in test processes that exit without atexit."""
    for folder in Path(gettempdir()).glob(f"{KEPT}{os.getpid()}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def make_checkpoint(
    folder: Path,
    family: str,
    *,
    tied: bool = False,
    rope: str | dict[str, Any] = "default",
    shards: int = 1,
    seed: int = 0,
    vocab: int = VOCAB,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> PreTrainedModel:
    """Save a random decoder to `folder` and return it, in eval mode with eager attention.

    It has 2 layers, hidden size 48, 4 query and 2 KV heads of 12. Biases and norm weights are random, too,
    and weights are large enough to make any mistake visible in the logits.

    Args:
        shards: minimum number of weight files.
        overrides: keys of the configuration.
    """
    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
        "rope_parameters": dict({**ROPES, **PARTIAL_ROPES}[rope] if isinstance(rope, str) else rope),
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": None,
    }
    sizes = {**sizes, **SPECIAL.get(family, {}), **overrides}
    if family in HEADS_FILL_HIDDEN:
        sizes["hidden_size"] = sizes["num_attention_heads"] * sizes.pop("head_dim")
    if family in NO_KV_HEADS:
        del sizes["num_key_value_heads"]
    if family in LATENT_FAMILIES:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    names = {name: RENAMED.get(family, {}).get(name, name) for name in sizes}
    config = AutoConfig.for_model(
        family, **{name: sizes[usual] for usual, name in names.items() if name is not None}
    )
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    randomise(model, seed, gemma="gemma" in family)
    cast_parameters(model, dtype)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=2 * total if shards == 1 else total // shards)
    return model


def cast_parameters(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast like loading in that dtype does. `model.to` would round the rotary frequencies, too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def randomise(model: PreTrainedModel, seed: int, gemma: bool = False) -> None:
    """Randomise biases and norm weights, which transformers initialises to 0 and 1."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            elif "norm" in name or ".ln_" in name:
                usual = 0 if gemma else 1
                parameter.copy_(usual + torch.randn(parameter.shape, generator=generator) * 0.2)


def make_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Save a byte-level tokenizer: ids 0 … 255 are bytes in byte-level order, then BOS, EOS, IM_START, PAD."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|im_end|>", "<|im_start|>", "<|pad|>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return fast


def make_family_tokenizer(
    folder: Path, template: str, special: Sequence[str], plain: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Save the byte-level tokenizer with a family's chat template and further tokens.

    Args:
        special: special tokens, which texts omit.
        plain: other tokens.
    """
    fast = make_tokenizer(folder, template)
    fast.add_tokens([AddedToken(text, special=True, normalized=False) for text in special], True)
    fast.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    fast.save_pretrained(folder)
    return fast


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; `...` removes one."""
    raw = json.loads(path.read_text())
    raw.update(changes)
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def make_model_folder(folder: Path, family: str = "llama", **options: Any) -> PreTrainedModel:
    """Make a model folder with `make_checkpoint` and `make_tokenizer`."""
    make_tokenizer(folder)
    return make_checkpoint(folder, family, **options)
