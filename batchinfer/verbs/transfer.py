"""Fetches large files over HTTP into a cache's blobs. What has arrived stays, so that the next process continues it.

Not huggingface_hub's own downloads: they start a file anew in every process, since their partial files have random
names (2.4.0 still), and compare its size, not its sha256. Below them, `http_get` is theirs: requests, retries, resume.
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


class Stopped(Exception):
    """Another file's failure, or a signal, ended the transfer."""


@dataclass(frozen=True, slots=True)
class Blob:
    """One file: where it is, and the blob that it becomes, which is named by the sha256 of its content."""

    name: str
    url: str
    blob: Path
    size: int

    @property
    def partial(self) -> Path:
        """The file with the bytes that arrived so far; huggingface_hub, too, removes files named `.incomplete`."""
        return self.blob.with_name(f"{self.blob.name}.incomplete")

    def there(self) -> int:
        """Bytes that have arrived."""
        for path in (self.blob, self.partial):
            try:
                return min(path.stat().st_size, self.size)
            except FileNotFoundError:
                continue
        return 0


class Transfer:
    """Fetches parts, each in a thread of the caller's, until `stop`."""

    def __init__(self) -> None:
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End the parts in work at their next bytes, and begin no further one."""
        self._stopping.set()

    def fetch(self, part: Blob) -> None:
        """Continue the part to its end, check it, and put it in its place. Raises Unavailable, and what HTTP raises."""
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # not in its __all__

        if self._stopping.is_set():
            raise Stopped
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
        """A progress bar for http_get, which reports every piece to it."""
        stopping = self._stopping

        class Watch:
            def __init__(self, **_: Any) -> None:
                """Nothing is drawn: the partial files' sizes say how far it is."""

            def __enter__(self) -> Watch:
                return self

            def __exit__(
                self,
                kind: type[BaseException] | None,
                error: BaseException | None,
                trace: TracebackType | None,
            ) -> None:
                """Nothing was opened."""

            def update(self, _: int) -> None:
                file.flush()
                if stopping.is_set():
                    raise Stopped

        return Watch
