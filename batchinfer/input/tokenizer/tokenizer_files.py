"""Reads the files of a checkpoint's tokenizer: regular files of bounded size, and nothing else."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from batchinfer.core.errors import SecurityRefusal
from batchinfer.core.model_links import inside, model_roots
from batchinfer.input.tokenizer.slow_tokenizer import wrong_tokenizer

# The largest public tokenizers have 0.9 million tokens, and 35 MB. One of 1,048,576 tokens takes 0.8 GiB of memory in
# each process that renders prompts.
MAX_TOKENS = 1 << 20
MAX_BYTES = 256 << 20
_SHOWN = 200  # characters of an error's text that a message quotes


def held(path: Path) -> bool:
    """Whether there is such a file. Raises SecurityRefusal for a link out of the model's folder, and for what is no
    regular file: opening a pipe would hang."""
    try:
        mode = inside(path, model_roots(path.parent.resolve())).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not stat.S_ISREG(mode):
        raise SecurityRefusal(f"{path} is not a regular file; put a copy of the file there")
    return True


def read_bytes(path: Path) -> bytes:
    """The content of a file that is `held`. Raises JobFileError when it is too big."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        text = f"{path.name} has {size:,} bytes; at most {MAX_BYTES:,} are read"
        raise wrong_tokenizer(path.parent, text, "use another model")
    return path.read_bytes()


def read_text(path: Path) -> str:
    """The text of a file that is `held`. Raises JobFileError."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"{path.name}: the byte at {error.start} is not UTF-8"
        raise wrong_tokenizer(path.parent, message) from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty when there is no such file. Raises JobFileError, SecurityRefusal."""
    if not held(path):
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise wrong_tokenizer(path.parent, f"{path.name} is not valid JSON: {str(error)[:_SHOWN]}") from None
    if not isinstance(value, dict):
        raise wrong_tokenizer(path.parent, f"{path.name} must hold a JSON object")
    return value
