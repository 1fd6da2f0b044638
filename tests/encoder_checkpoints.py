"""Tiny random encoders, saved by transformers as a user's would be."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    MPNetConfig,
    MPNetForSequenceClassification,
    MPNetModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from tests.checkpoints import VOCAB, kept_folder, randomise

_USUAL: dict[str, Any] = {"num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 64}
_PADDED = {"max_position_embeddings": 130, "pad_token_id": 1}
_DISTIL: dict[str, Any] = {"n_heads": 4, "n_layers": 3, "dim": 48, "hidden_dim": 64}
_MODERN: dict[str, Any] = {**_USUAL, "local_attention": 20, "norm_bias": True, "pad_token_id": 1}
_ONE_TYPE: dict[str, Any] = {**_USUAL, **_PADDED, "type_vocab_size": 1}
Made = tuple[type[Any], type[Any], dict[str, Any]]
ENCODERS: dict[str, Made] = {
    "bert": (BertConfig, BertModel, _USUAL),
    "bert-for-masked-lm": (BertConfig, BertForMaskedLM, {**_USUAL, "hidden_act": "gelu_new"}),
    "roberta": (RobertaConfig, RobertaModel, _ONE_TYPE),
    "xlm-roberta": (XLMRobertaConfig, XLMRobertaModel, _ONE_TYPE),
    "mpnet": (MPNetConfig, MPNetModel, {**_USUAL, **_PADDED}),
    "distilbert": (DistilBertConfig, DistilBertModel, _DISTIL),
    "modernbert": (ModernBertConfig, ModernBertModel, _MODERN),
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


_MEAN = {"classifier_pooling": "mean", "classifier_bias": True, "classifier_activation": "silu"}
CROSS_ENCODERS: dict[str, Made] = {
    "cross-bert": (BertConfig, BertForSequenceClassification, _USUAL),
    "cross-roberta": (RobertaConfig, RobertaForSequenceClassification, _ONE_TYPE),
    "cross-xlm-roberta": (XLMRobertaConfig, XLMRobertaForSequenceClassification, _ONE_TYPE),
    "cross-mpnet": (MPNetConfig, MPNetForSequenceClassification, {**_USUAL, **_PADDED}),
    "cross-distilbert": (DistilBertConfig, DistilBertForSequenceClassification, _DISTIL),
    "cross-modernbert": (ModernBertConfig, ModernBertForSequenceClassification, _MODERN),
    "cross-modernbert-mean": (ModernBertConfig, ModernBertForSequenceClassification, {**_MODERN, **_MEAN}),
}


def make_encoder(folder: Path, family: str, seed: int = 0, **overrides: Any) -> None:
    """Save a random encoder of 3 layers, hidden 48 and 4 heads of 12, `overrides` go to the configuration. Weights are
    large enough that a slip in any of them changes the vectors visibly."""
    config_class, model_class, options = {**ENCODERS, **CROSS_ENCODERS}[family]
    sizes = {
        **({"num_labels": 1} if family in CROSS_ENCODERS else {}),
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
