"""The file that `prompt.chat_template` names: a chat template in Jinja."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MAX_BYTES = 4 << 20  # four times as much as a template may have characters, of which one has up to four bytes


def read_template_file(path: Path) -> str:
    """The text of the file. Raises ValueError, which says what is wrong with the file."""
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
