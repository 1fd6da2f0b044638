"""Downloads large files over HTTP into a cache's blobs. A later process continues a partial download.

huggingface_hub's own download restarts files in every process, because its partial files have random names (still
so in 2.4.0), and compares sizes instead of SHA-256. Its `http_get` is used for requests, retries and resuming.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from batchinfer.core.errors import Unavailable
from batchinfer.filesystem.durable import sha256_of, storage


class DownloadStopped(Exception):
    """Raised in a thread whose download was stopped, because another file failed or a signal arrived."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A file of a hub repository to download into the Hugging Face cache.

    Attributes:
        name: The name of the file in its repository.
        url: The address.
        blob: The path in the cache, named after the SHA-256 of the content.
        size: The size in bytes.
    """

    name: str
    url: str
    blob: Path
    size: int

    @property
    def partial(self) -> Path:
        """Return the path of the incomplete file.

        It ends in `.incomplete`, so that huggingface_hub cleans it up, too.
        """
        return self.blob.with_name(f"{self.blob.name}.incomplete")

    def there(self) -> int:
        """Return the number of bytes of the file that are already downloaded."""
        for path in (self.blob, self.partial):
            try:
                return min(path.stat().st_size, self.size)
            except FileNotFoundError:
                continue
        return 0


class Transfer:
    """Downloads files into the Hugging Face cache. Several threads call `fetch`, until `stop` is called."""

    def __init__(self) -> None:
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Stop running downloads when their next bytes arrive. Later calls of `fetch` raise Stopped."""
        self._stopping.set()

    def fetch(self, part: Blob) -> None:
        """Download a file or the rest of it, check its SHA-256, and move it into the cache.

        Errors of HTTP are raised as huggingface_hub raises them.

        Args:
            part: The file.

        Raises:
            Unavailable: The content does not have the expected SHA-256.
            DownloadStopped: `stop` was called.
        """
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # not in its __all__

        if self._stopping.is_set():
            raise DownloadStopped
        part.blob.parent.mkdir(parents=True, exist_ok=True)
        with part.partial.open("ab") as file:
            if file.tell() > part.size:
                file.truncate(0)
            headers = build_hf_headers(library_name="batchinfer") | {"Accept-Encoding": "identity"}
            http_get(
                part.url, file, resume_size=file.seek(0, os.SEEK_END), headers=headers,
                expected_size=part.size, tqdm_class=self._watch(file),
            )  # fmt: skip
            file.flush()
            os.fsync(file.fileno())
        self._keep(part)

    def _keep(self, part: Blob) -> None:
        found = sha256_of(part.partial)
        if found == part.blob.name:
            with storage(part.blob, "rename"):
                part.partial.replace(part.blob)
            return
        part.partial.unlink()
        raise Unavailable(
            f"{part.name} arrived damaged: its sha256 is {found} instead of {part.blob.name}; the same command "
            "fetches it again"
        )

    def _watch(self, file: Any) -> Any:
        # http_get calls the progress bar after every piece. It flushes `file`, whose size shows the progress.
        stopping = self._stopping

        class Watch:
            def __init__(self, **_: Any) -> None:
                """Draw nothing: progress is read from the sizes of the incomplete files."""

            def __enter__(self) -> Watch:
                return self

            def __exit__(
                self,
                kind: type[BaseException] | None,
                error: BaseException | None,
                trace: TracebackType | None,
            ) -> None:
                """Return without closing anything."""

            def update(self, _: int) -> None:
                file.flush()
                if stopping.is_set():
                    raise DownloadStopped

        return Watch
