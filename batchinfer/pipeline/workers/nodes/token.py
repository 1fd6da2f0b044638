"""The secret that a run and its nodes share: a file that its owner alone can read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from batchinfer.core.errors import InputMissing, SecurityRefusal

LEAST, MOST = 32, 4096  # bytes, without the blanks around them
_HOW = "make one with: (umask 077; head -c 32 /dev/urandom | base64 > {path})"


def read_token(path: Path) -> bytes:
    """Return the token of a file. Raises InputMissing without the file, and SecurityRefusal for one that others than
    its owner may read or write, or that is too short to be secret."""
    try:
        with path.open("rb") as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read(MOST + 1)
    except OSError as error:
        raise InputMissing(f"the token file cannot be read: {error}; {_HOW.format(path=path)}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise SecurityRefusal(
            f"{path}: others may read or write this token (mode {stat.S_IMODE(mode):04o}); run: chmod 600 {path}"
        )
    token = text.strip()
    if not LEAST <= len(token) <= MOST:
        raise SecurityRefusal(
            f"{path}: a token has {LEAST} to {MOST} bytes, and this one has {len(token)}; {_HOW.format(path=path)}"
        )
    return token
