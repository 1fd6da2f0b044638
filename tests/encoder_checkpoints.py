"""Tiny random encoders, saved by transformers as a user's would be."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from tests.checkpoints import VOCAB, kept_folder, randomise

_USUAL: dict[str, Any] = {"num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 64}
_PADDED = {"max_position_embeddings": 130, "pad_token_id": 1}
ENCODERS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "bert": (BertConfig, BertModel, _USUAL),
    "bert-for-masked-lm": (BertConfig, BertForMaskedLM, {**_USUAL, "hidden_act": "gelu_new"}),
    "roberta": (RobertaConfig, RobertaModel, {**_USUAL, **_PADDED, "type_vocab_size": 1}),
    "xlm-roberta": (XLMRobertaConfig, XLMRobertaModel, {**_USUAL, **_PADDED, "type_vocab_size": 1}),
    "mpnet": (MPNetConfig, MPNetModel, {**_USUAL, **_PADDED}),
    "distilbert": (
        DistilBertConfig,
        DistilBertModel,
        {"n_heads": 4, "n_layers": 3, "dim": 48, "hidden_dim": 64},
    ),
    "modernbert": (
        ModernBertConfig,
        ModernBertModel,
        {**_USUAL, "local_attention": 20, "norm_bias": True, "pad_token_id": 1},
    ),
    "gemma3_text": (
        Gemma3TextConfig,
        Gemma3TextModel,
        {
            **_USUAL,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "sliding_window": 20,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 20,
            "use_bidirectional_attention": True,
            "pad_token_id": None,
        },
    ),
}


def make_encoder(folder: Path, family: str, seed: int = 0, **overrides: Any) -> None:
    """Save a random encoder of 3 layers, hidden 48 and 4 heads of 12, `overrides` go to the configuration. Weights are
    large enough that a slip in any of them changes the vectors visibly."""
    config_class, model_class, options = ENCODERS[family]
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        **options,
        **overrides,
    }
    if "dim" in sizes:
        del sizes["hidden_size"]
    config = config_class(**sizes)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model: PreTrainedModel = model_class(config).eval()
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
