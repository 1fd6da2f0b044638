"""Checkpoints in the layout of sentence-transformers, written by hand: that package is not needed to read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoTokenizer

from tests.checkpoints import make_model_folder

PROMPTS = {"query": "find: ", "document": ""}


def make_sentence_model(
    folder: Path, mode: str = "lasttoken", family: str = "qwen3", normalizes: bool = True, **config: Any
) -> None:
    """A model whose tokenizer ends each text with its EOS, and the modules around it. `config`: of the prompts."""
    make_model_folder(folder, family)
    path = folder / "tokenizer.json"
    rust = Tokenizer.from_file(str(path))
    eos = rust.token_to_id("<|im_end|>")
    rust.post_processor = TemplateProcessing(single="$A <|im_end|>", special_tokens=[("<|im_end|>", eos)])
    rust.save(str(path))
    write_modules(folder, mode, normalizes)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS, **config}))


def write_modules(folder: Path, mode: str, normalizes: bool = True, *more: str) -> None:
    """Write which modules there are, `more` behind the pooling."""
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
    names = (
        "cls_token",
        "mean_tokens",
        "max_tokens",
        "mean_sqrt_len_tokens",
        "weightedmean_tokens",
        "lasttoken",
    )
    pooling = {f"pooling_mode_{name}": name == mode for name in names}
    (folder / "1_Pooling/config.json").write_text(
        json.dumps({"word_embedding_dimension": 48, **pooling, "include_prompt": True})
    )


def reference(folder: Path, texts: Sequence[str], mode: str = "lasttoken") -> torch.Tensor:
    """What transformers gives for each text by itself, of length 1."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found = []
    with torch.no_grad():
        for text in texts:
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            found.append(states[-1] if mode == "lasttoken" else states.mean(0))
    return torch.nn.functional.normalize(torch.stack(found), dim=1)
