"""A small valid config.json to vary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PATH = Path("/models/tiny/config.json")


def raw_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """Return the object of a config.json; a change to `...` removes the key."""
    raw = {
        "model_type": family,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 260,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        **changes,
    }
    return {key: value for key, value in raw.items() if value is not ...}
