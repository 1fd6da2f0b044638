"""All prompts of a job end to end in one flat file of little-endian int32."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import numpy as np

from batchinfer.data.storage.durable import DurableFile, FileOps
from batchinfer.errors import StorageError
from batchinfer.request import TokenIds

_BUFFER_TOKENS = 1 << 20


class TokenStore:
    """Reads prompts by offset and count; the file is mapped, not loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            # numpy cannot map an empty file
            self._tokens = np.memmap(path, "<i4", "r") if size else np.zeros(0, np.int32)
        except (OSError, ValueError) as error:
            raise StorageError(
                f"{path}: the token store cannot be read: {error}; remove its folder"
            ) from None

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, offset: int, count: int) -> TokenIds:
        """A copy of `count` token ids from `offset`, both in tokens. Raises IndexError outside the store."""
        if offset < 0 or count < 0 or offset + count > len(self._tokens):
            raise IndexError(f"tokens {offset}..{offset + count} of a store of {len(self._tokens)}")
        return np.array(self._tokens[offset : offset + count], dtype=np.int32)


class TokenWriter:
    """Appends prompts; the file takes its name in `commit()`."""

    def __init__(self, path: Path, ops: FileOps) -> None:
        self._file = DurableFile(path, ops)
        self._held: list[TokenIds] = []
        self._held_tokens = 0
        self.tokens = 0

    def append(self, tokens: TokenIds) -> int:
        """Write one batch's prompts end to end; the offset of the first token."""
        offset = self.tokens
        self._held.append(tokens)
        self._held_tokens += len(tokens)
        self.tokens += len(tokens)
        if self._held_tokens >= _BUFFER_TOKENS:
            self._write()
        return offset

    def _write(self) -> None:
        if self._held_tokens:
            self._file.write(np.concatenate(self._held).astype("<i4").tobytes())
        self._held, self._held_tokens = [], 0

    def commit(self) -> None:
        """Make the file complete and durable. Raises StorageError."""
        self._write()
        self._file.commit()

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._file.close()
