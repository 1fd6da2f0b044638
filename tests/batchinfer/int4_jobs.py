"""Jobs whose first run calibrates int4 weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.checkpoints import make_checkpoint, make_tokenizer

ROWS = [{"text": f"alpha {number} and beta {number % 7}"} for number in range(30)]
PLAIN = {"prompt": {"text": "text", "system": None, "user": None}, "sampling": {"max_tokens": 6}}
INT4 = (("model.quantization", "int4"), ("model.dtype", "float32"))


def make_divisible(folder: Path, family: str = "llama", **sizes: Any) -> Path:
    """Make a model whose layers are multiples of groups of 32 inputs."""
    make_checkpoint(folder, family, **{"hidden_size": 64, "intermediate_size": 96, "head_dim": 16} | sizes)
    make_tokenizer(folder)
    return folder
