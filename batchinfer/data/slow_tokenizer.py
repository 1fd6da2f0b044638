"""Tokenizers that a checkpoint keeps in an older form, converted to the Rust one in a process of their own.

The conversion is transformers' and brings torch along, which this process is to stay free of.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from batchinfer.errors import JobFileError, Mistake


def converted(folder: Path) -> str:
    """The text of a tokenizer.json for the tokenizer in `folder`. Raises JobFileError."""
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(_convert, str(folder)).result()
    except (
        OSError,
        ValueError,
        ImportError,
        AttributeError,
        KeyError,
        TypeError,
        BrokenProcessPool,
    ) as error:
        raise wrong_tokenizer(
            folder, f"its tokenizer cannot be converted to tokenizer.json: {error}"
        ) from None


def wrong_tokenizer(folder: Path, message: str) -> JobFileError:
    """The error of a checkpoint whose tokenizer is missing or damaged: the job names the wrong folder."""
    hint = "the download may be incomplete; copy the checkpoint again"
    return JobFileError(str(folder), [Mistake("model.path", message, hint=hint)])


def _convert(folder: str) -> str:
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return str(slow.backend_tokenizer.to_str())
