"""Tiny random encoders, saved by transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from tests.checkpoints import VOCAB, kept_folder, randomise

_USUAL: dict[str, Any] = {"num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 64}
_PADDED = {"max_position_embeddings": 130, "pad_token_id": 1}
_DISTIL: dict[str, Any] = {"n_heads": 4, "n_layers": 3, "dim": 48, "hidden_dim": 64}
_MODERN: dict[str, Any] = {**_USUAL, "local_attention": 20, "norm_bias": True, "pad_token_id": 1}
_ONE_TYPE: dict[str, Any] = {**_USUAL, **_PADDED, "type_vocab_size": 1}
# Model type → options of its configuration
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _USUAL,
    "bert-for-masked-lm": {**_USUAL, "hidden_act": "gelu_new"},
    "roberta": _ONE_TYPE,
    "xlm-roberta": _ONE_TYPE,
    "mpnet": {**_USUAL, **_PADDED},
    "distilbert": _DISTIL,
    "modernbert": _MODERN,
    "gemma3_text": {
        **_USUAL,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 20,
        "use_bidirectional_attention": True,
        "pad_token_id": None,
    },
}
_MEAN = {"classifier_pooling": "mean", "classifier_bias": True, "classifier_activation": "silu"}
CROSS_ENCODERS: dict[str, dict[str, Any]] = {
    "cross-bert": _USUAL,
    "cross-roberta": _ONE_TYPE,
    "cross-xlm-roberta": _ONE_TYPE,
    "cross-mpnet": {**_USUAL, **_PADDED},
    "cross-distilbert": _DISTIL,
    "cross-modernbert": _MODERN,
    "cross-modernbert-mean": {**_MODERN, **_MEAN},
}


def make_encoder(folder: Path, family: str, seed: int = 0, **overrides: Any) -> None:
    """Save a random encoder of 3 layers, hidden size 48 and 4 heads of 12.

    Weights are large enough to make any mistake visible in the vectors.

    Args:
        overrides: keys of the configuration.
    """
    kind = family.removeprefix("cross-").removesuffix("-mean").removesuffix("-for-masked-lm")
    classes = auto.MODEL_FOR_MASKED_LM_MAPPING if family.endswith("-lm") else auto.MODEL_MAPPING
    classes = auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if family in CROSS_ENCODERS else classes
    sizes = {
        **({"num_labels": 1} if family in CROSS_ENCODERS else {}),
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        **{**ENCODERS, **CROSS_ENCODERS}[family],
        **overrides,
    }
    if "dim" in sizes:
        del sizes["hidden_size"]
    config = AutoConfig.for_model(kind, **sizes)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model: PreTrainedModel = classes[type(config)](config).eval()
    randomise(model, seed, gemma="gemma" in family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "LayerNorm.weight" in name or "layer_norm.weight" in name:
                parameter.copy_(1 + torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)


@cache
def encoder_folder(family: str, **options: Any) -> Path:
    made = kept_folder()
    make_encoder(made, family, seed=5, **options)
    return made
