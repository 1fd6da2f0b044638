"""Reads the chat template in `prompt.chat_template`."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MAX_BYTES = 4 << 20  # 2**20 characters of up to four bytes


def read_template_file(path: Path) -> str:
    """Return the content of a file that is a chat template (Jinja).

    Raises:
        ValueError: The file cannot be read, is too large, empty or not UTF-8. The message is for users.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would hang
            raise ValueError(f"{path} is no regular file; name a file with a chat template")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path} is over {MAX_BYTES:,} bytes; a chat template is a text in Jinja")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: the byte at {error.start} is not UTF-8") from None
    if not text.strip():
        raise ValueError(f"{path} is empty; a chat template is a text in Jinja")
    return text
