"""A Hugging Face hub on loopback: the endpoints that huggingface_hub downloads from, and faults on demand."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".bin", ".gguf")  # held as LFS: named by their sha256


@dataclass
class Hub:
    """A model with its files by commit.

    Attributes:
        served: bytes sent per file.
    """

    repo: str
    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    url: str = ""
    breaks: dict[str, int] = field(default_factory=dict)  # by file: bytes before the connection breaks
    damaged: set[str] = field(default_factory=set)
    error: tuple[int, str] | None = None  # every answer is this status, with this X-Error-Code
    stalled: threading.Event = field(
        default_factory=threading.Event
    )  # set: a broken connection hangs instead of breaking
    reached: threading.Event = field(default_factory=threading.Event)  # a break was reached
    served: Counter[str] = field(default_factory=Counter)
    tokens: dict[str, str | None] = field(default_factory=dict)  # request → its Authorization

    def files(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commit = self.refs.get(revision, revision)
        return (commit, self.commits[commit]) if commit in self.commits else None


def files_of(folder: Path) -> dict[str, bytes]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing to stderr."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.tokens[f"{self.command} {path}"] = self.headers.get("Authorization")
        if hub.error is not None:
            self._refuse(*hub.error)
        elif path.startswith(f"/api/models/{hub.repo}/revision/"):
            self._info(path.removeprefix(f"/api/models/{hub.repo}/revision/"))
        elif path.startswith(f"/api/models/{hub.repo}/tree/"):
            self._tree(path.removeprefix(f"/api/models/{hub.repo}/tree/"))
        elif path.startswith(f"/{hub.repo}/resolve/"):
            commit, _, name = path.removeprefix(f"/{hub.repo}/resolve/").partition("/")
            self._file(commit, name)
        else:
            self._refuse(404, "RepoNotFound")

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code})

    def _info(self, revision: str) -> None:
        found = self.hub.files(revision)
        if found is None:
            self._refuse(404, "RevisionNotFound")
            return
        siblings = [{"rfilename": name} for name in found[1]]
        self._json({"id": self.hub.repo, "sha": found[0], "siblings": siblings})

    def _tree(self, asked: str) -> None:
        """Return the files of a revision: its folder, a subfolder, or all of them."""
        revision, _, folder = asked.partition("/")
        found = self.hub.files(revision)
        if found is None:
            self._refuse(404, "RevisionNotFound")
            return
        if "recursive=true" in urlsplit(self.path).query.lower():
            self._json([self._entry(name, data) for name, data in found[1].items()])
            return
        own = {name: data for name, data in found[1].items() if name.rpartition("/")[0] == folder}
        inner = {name.partition("/")[0] for name in found[1] if "/" in name and not folder}
        folders = [{"type": "directory", "path": name, "oid": "0" * 40} for name in sorted(inner)]
        self._json([*folders, *(self._entry(name, data) for name, data in own.items())])

    def _entry(self, name: str, data: bytes) -> dict[str, Any]:
        entry = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        if name.endswith(LARGE):
            entry["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 130}
        return entry

    def _file(self, commit: str, name: str) -> None:
        found = self.hub.files(commit)
        if found is None or name not in found[1]:
            self._refuse(404, "EntryNotFound")
            return
        data = found[1][name]
        etag = sha256(data) if name.endswith(LARGE) else hashlib.sha1(data).hexdigest()
        headers = {"X-Repo-Commit": found[0], "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if name.endswith(LARGE):
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if name in self.hub.damaged:
            data = bytes(byte ^ 1 for byte in data)
        self._send(206 if start else 200, data[start:], headers, name, start)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], name: str = "", start: int = 0
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        end = self.hub.breaks.get(name)
        part = body if end is None else body[: max(0, end - start)]
        self.hub.served[name] += len(part)
        self.wfile.write(part)
        self.wfile.flush()
        if end is not None:
            self.hub.reached.set()
            while self.hub.stalled.is_set():
                time.sleep(0.05)
            self.close_connection = True
