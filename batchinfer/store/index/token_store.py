"""Stores all prompts of a job in one flat file of little-endian int32."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from types import TracebackType

import numpy as np

from batchinfer.core.errors import StorageError
from batchinfer.core.request import TokenIds
from batchinfer.filesystem.durable import DurableFile, FileOps

TOKEN_BYTES = 4


class TokenStore:
    """Reads prompts from the file with the token ids of all prompts of a job.

    The file is not memory-mapped, since an error of the disk would then kill the process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise StorageError(_unreadable(path, error)) from None
        weakref.finalize(self, os.close, self._file)
        self._tokens = os.fstat(self._file).st_size // TOKEN_BYTES

    def __len__(self) -> int:
        return self._tokens

    def read(self, offset: int, count: int) -> TokenIds:
        """Return token ids from the file of all prompts.

        Args:
            offset: The position of the first one in the file, counted in tokens.
            count: The number of token ids.

        Raises:
            IndexError: The range exceeds the file.
            StorageError: The file cannot be read.
        """
        if offset < 0 or count < 0 or offset + count > self._tokens:
            raise IndexError(f"tokens {offset}..{offset + count} of a store of {self._tokens}")
        tokens = np.empty(count, "<i4")
        try:
            read = os.preadv(self._file, [tokens.data], offset * TOKEN_BYTES)
        except OSError as error:
            raise StorageError(_unreadable(self.path, error)) from None
        if read < count * TOKEN_BYTES:
            raise StorageError(_unreadable(self.path, "it became shorter"))
        return tokens


def _unreadable(path: Path, why: object) -> str:
    return f"{path}: the token store cannot be read: {why}; remove its folder"


class TokenWriter:
    """Writes the token ids of prompts to the file of all prompts.

    It has a temporary name until `commit()`.
    """

    def __init__(self, path: Path, ops: FileOps) -> None:
        self._file = DurableFile(path, ops)
        self.tokens = 0

    def append(self, tokens: TokenIds) -> int:
        """Append token ids of prompts, and return the number of token ids before them in the file."""
        offset = self.tokens
        if len(tokens):
            self._file.write(np.ascontiguousarray(tokens, "<i4").data.cast("B"))
        self.tokens += len(tokens)
        return offset

    def written(self) -> Path:
        """Return the temporary file, with all prompts so far written to it. Raises StorageError."""
        self._file.drain()
        return self._file.temporary

    def commit(self) -> None:
        """Make the file of prompts complete and durable. Raises StorageError."""
        self._file.commit()

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._file.close()
