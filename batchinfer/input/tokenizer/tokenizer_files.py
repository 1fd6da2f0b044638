"""Reads the files of a checkpoint's tokenizer. Only regular files of bounded size are read."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from batchinfer.core.errors import SecurityRefusal
from batchinfer.core.model_links import model_roots, resolve_inside
from batchinfer.input.tokenizer.slow_tokenizer import wrong_tokenizer

# The largest public tokenizers have 0.9 million tokens and 35 MB. A tokenizer with 1,048,576 tokens takes 0.8 GiB of
# memory in each render worker.
MAX_TOKENS = 1 << 20
MAX_BYTES = 256 << 20
_SHOWN = 200  # maximum characters of a library's error in a message


def file_exists(path: Path) -> bool:
    """Return True if a file of a tokenizer exists.

    Raises:
        SecurityRefusal: The path is a link out of the model's folder, or not a regular file, such as a pipe.
    """
    try:
        mode = resolve_inside(path, model_roots(path.parent.resolve())).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not stat.S_ISREG(mode):
        raise SecurityRefusal(f"{path} is not a regular file; put a copy of the file there")
    return True


def read_bytes(path: Path) -> bytes:
    """Return the content of a tokenizer's file, which must exist. Raises JobFileError if it is too large."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        text = f"{path.name} has {size:,} bytes; at most {MAX_BYTES:,} are read"
        raise wrong_tokenizer(path.parent, text, "use another model")
    return path.read_bytes()


def read_text(path: Path) -> str:
    """Return the text of a tokenizer's file, which must exist. Raises JobFileError if it is too large or not UTF-8."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"{path.name}: the byte at {error.start} is not UTF-8"
        raise wrong_tokenizer(path.parent, message) from None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a tokenizer's file. {} if the file does not exist.

    Raises:
        JobFileError: The file is too large, or has no JSON object.
        SecurityRefusal: It is not a regular file in the model's folder.
    """
    if not file_exists(path):
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise wrong_tokenizer(path.parent, f"{path.name} is not valid JSON: {str(error)[:_SHOWN]}") from None
    if not isinstance(value, dict):
        raise wrong_tokenizer(path.parent, f"{path.name} must hold a JSON object")
    return value
