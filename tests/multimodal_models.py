"""Tiny multimodal models, with tensor names of published checkpoints or of transformers 5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedModel

from tests.checkpoints import BOS, EOS, SPECIAL, VOCAB, randomise

SINGLE = "model.safetensors"
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
# Class → model_type of the whole, of its text part, and further keys of its vision tower
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": ("gemma3", "gemma3_text", {}),
    "Mistral3ForConditionalGeneration": ("mistral3", "mistral", {}),
    "LlavaForConditionalGeneration": ("llava", "llama", {"projection_dim": 16}),
    "LlavaNextForConditionalGeneration": ("llava_next", "granite", {"projection_dim": 16}),
    "InternVLForConditionalGeneration": ("internvl", "qwen3", {"image_size": [16, 16], "patch_size": [4, 4]}),
    "AyaVisionForConditionalGeneration": ("aya_vision", "cohere2", {}),
    "Idefics3ForConditionalGeneration": ("idefics3", "llama", {}),
    "SmolVLMForConditionalGeneration": ("smolvlm", "llama", {}),
}


def make_multimodal(folder: Path, name: str, own_names: bool = False, **text: Any) -> PreTrainedModel:
    """Save a random model of the class.

    Args:
        text: keys of its decoder's configuration.
    """
    kind, text_kind, vision = MODELS[name]
    heads = {} if text_kind == "cohere2" else {"head_dim": 12}
    stated = {**_TEXT, **heads, **SPECIAL.get(text_kind, {}), **text, "model_type": text_kind}
    default = AutoConfig.for_model(kind)
    config = type(default)(
        text_config=AutoConfig.for_model(**stated),
        vision_config={**_VISION, **vision, "model_type": default.vision_config.model_type},
        image_token_index=5,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = getattr(transformers, name)(config).eval()
    randomise(model, 3, gemma="gemma" in kind)
    model.save_pretrained(folder)  # by the names of transformers 4
    if own_names:
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        named = {key: value.clone() for key, value in model.state_dict().items() if key not in tied}
        save_file(named, folder / SINGLE, metadata={"format": "pt"})
    return model


def stated_text(folder: Path) -> dict[str, Any]:
    """Return text_config of its config.json."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["text_config"]
    return found
