"""Converts tokenizers in older formats to tokenizer.json, in a child process.

The conversion uses transformers, which imports torch. The calling process must not import torch.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from batchinfer.core.errors import JobFileError, Mistake
from batchinfer.machine.ask_child import ChildDied, ask_child

_FAILURES = (OSError, ValueError, ImportError, AttributeError, KeyError, TypeError)
CONVERTER = "batchinfer.input.tokenizer.slow_tokenizer:convert"
_AGAIN = "the download may be incomplete; copy the checkpoint again"
WITHIN_S = 900.0  # time limit in seconds; the import takes about 5 s, the largest tokenizers a minute


def convert_in_child(folder: Path) -> str:
    """Convert the tokenizer of a checkpoint that has no tokenizer.json, and return the text of such a file.

    A child process does the work, because it imports large libraries and may crash.

    Args:
        folder: The folder of the checkpoint.

    Raises:
        JobFileError: The tokenizer cannot be converted.
    """
    try:
        what = "the process that converts the tokenizer"
        text, problem = ask_child(what, CONVERTER, str(folder), within_s=WITHIN_S)
    except ChildDied as died:
        text, problem = None, f"the process that converts it {died}"
    if text is None:
        raise wrong_tokenizer(folder, f"its tokenizer cannot be converted to tokenizer.json: {problem}")
    return str(text)


def wrong_tokenizer(folder: Path, message: str, hint: str = _AGAIN) -> JobFileError:
    """Return the error to raise for a checkpoint whose tokenizer is missing or damaged.

    Args:
        folder: The folder or file of the checkpoint.
        message: The problem.
        hint: Advice for the user. By default, to copy the checkpoint again.
    """
    return JobFileError(str(folder), [Mistake("model.path", message, hint=hint)])


def convert(folder: str, connection: Connection[Any, Any]) -> None:
    """Run the child process: convert the tokenizer in a folder, and send the result.

    Args:
        folder: The folder of the checkpoint.
        connection: The connection to the parent. It gets (text of the tokenizer.json, None) or (None, problem).
    """
    try:
        connection.send((_convert(folder), None))
    except _FAILURES as error:
        connection.send((None, str(error)))


def _convert(folder: str) -> str:
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return str(slow.backend_tokenizer.to_str())
