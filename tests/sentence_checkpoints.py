"""Checkpoints in the layout of sentence-transformers, written by hand without that package."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from tests.checkpoints import make_model_folder, make_tokenizer
from tests.encoder_checkpoints import make_encoder

PROMPTS = {"query": "find: ", "document": ""}
SINGLE = "<|bos|> $A <|im_end|>"


def _surround(folder: Path, single: str, pair: str | None = None) -> None:
    """Let the tokenizer add tokens around texts and pairs."""
    path = str(folder / "tokenizer.json")
    rust = Tokenizer.from_file(path)
    ends = [(text, rust.token_to_id(text)) for text in ("<|bos|>", "<|im_end|>")]
    rust.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=ends)
    rust.save(path)


def make_sentence_model(
    folder: Path, mode: str = "lasttoken", family: str = "qwen3", normalizes: bool = True, **config: Any
) -> None:
    """Write a model whose tokenizer ends each text with EOS, and its modules.

    Args:
        config: configuration of the prompts.
    """
    make_model_folder(folder, family)
    _surround(folder, "$A <|im_end|>")
    write_modules(folder, mode, normalizes)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS, **config}))


def make_sentence_encoder(
    folder: Path,
    family: str,
    mode: str = "cls_token",
    layers: Mapping[str, int] = MappingProxyType({}),
    **config: Any,
) -> None:
    """Write an encoder and its modules; its tokenizer adds a token before and after each text.

    Args:
        layers: options of the encoder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder, None)
    make_encoder(folder, family, **layers)
    _surround(folder, SINGLE)
    write_modules(folder, mode)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS, **config}))


def write_dense(folder: Path, sizes: Sequence[int], activations: Sequence[str], biased: bool = True) -> None:
    """Insert layers of these sizes after the pooling."""
    modules = json.loads((folder / "modules.json").read_text())
    generator = torch.Generator().manual_seed(8)
    for at, (inputs, outputs, activation) in enumerate(zip(sizes, sizes[1:], activations, strict=False)):
        name = f"{at + 2}_Dense"
        (folder / name).mkdir(exist_ok=True)
        stated = {"in_features": inputs, "out_features": outputs, "bias": biased}
        where = f"torch.nn.modules.activation.{activation}"
        (folder / name / "config.json").write_text(json.dumps({**stated, "activation_function": where}))
        tensors = {"linear.weight": torch.randn(outputs, inputs, generator=generator) * 0.2}
        if biased:
            tensors["linear.bias"] = torch.randn(outputs, generator=generator)
        save_file(tensors, folder / name / "model.safetensors")
        modules.insert(at + 2, {"path": name, "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))


def densely(folder: Path, vectors: torch.Tensor, activations: Sequence[str]) -> torch.Tensor:
    """Return the vectors after the folder's dense layers, by torch's own modules."""
    for at, activation in enumerate(activations):
        tensors = load_file(folder / f"{at + 2}_Dense/model.safetensors")
        made = torch.nn.functional.linear(vectors, tensors["linear.weight"], tensors.get("linear.bias"))
        vectors = getattr(torch.nn, activation)()(made)
    return vectors


def write_modules(folder: Path, mode: str, normalizes: bool = True, *more: str) -> None:
    """Write the list of modules, with `more` after the pooling."""
    kinds = ["Transformer", "Pooling", *more, *(["Normalize"] if normalizes else [])]
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{kind}" if at else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = (
        "cls_token",
        "mean_tokens",
        "max_tokens",
        "mean_sqrt_len_tokens",
        "weightedmean_tokens",
        "lasttoken",
    )
    pooling = {f"pooling_mode_{name}": name == mode for name in modes}
    (folder / "1_Pooling/config.json").write_text(
        json.dumps({"word_embedding_dimension": 48, **pooling, "include_prompt": True})
    )


def reference(folder: Path, texts: Sequence[str], mode: str = "lasttoken") -> torch.Tensor:
    """Return transformers' vector of each text alone, normalised to length 1."""
    return torch.nn.functional.normalize(pooled_states(folder, texts, mode), dim=1)


def pooled_states(folder: Path, texts: Sequence[str], mode: str) -> torch.Tensor:
    """Return transformers' pooled states of each text alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found = []
    with torch.no_grad():
        for text in texts:
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            at = {"lasttoken": -1, "cls_token": 0}
            found.append(states[at[mode]] if mode in at else states.mean(0))
    return torch.stack(found)


def make_cross_encoder(
    folder: Path, family: str = "cross-bert", tells_types: bool = True, **config: Any
) -> None:
    """Write a cross-encoder whose tokenizer adds its family's tokens to pairs.

    Args:
        tells_types: if True, a BERT's tokenizer returns token types.
        config: keys of its configuration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder, None)
    make_encoder(folder, family, **config)
    typed, stated = family in ("cross-bert", "cross-distilbert"), folder / "tokenizer_config.json"
    _surround(
        folder, SINGLE, f"{SINGLE} $B:1 <|im_end|>:1" if typed else f"{SINGLE} <|im_end|> $B <|im_end|>"
    )
    types = ["token_type_ids"] if family == "cross-bert" and tells_types else []
    inputs = ["input_ids", "attention_mask", *types]
    stated.write_text(json.dumps(json.loads(stated.read_text()) | {"model_input_names": inputs}))


def pair_logits(folder: Path, pairs: Sequence[tuple[str, str]], longest: int = 128) -> list[float]:
    """Return transformers' logit of each pair alone; long pairs are truncated as in sentence-transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return [
            model(**tokenizer(*pair, truncation=True, max_length=longest, return_tensors="pt")).logits.item()
            for pair in pairs
        ]
