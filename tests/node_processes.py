"""Processes that join a run as nodes, for tests: each in a process group of its own, marked so that none is lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.batchinfer.pipeline.test_orphans import MARK, marked
from tests.batchinfer.wrong_jobs import environment
from tests.patience import PATIENCE_S

ENGINE, RANK = b"workers.worker:main", b"workers.ranks.process:main"


@dataclass
class Node:
    """A process that offers itself to a run."""

    process: subprocess.Popen[bytes]
    mark: str
    said: Path  # a file

    def ended(self) -> int:
        """Its exit code, once it has ended."""
        return self.process.wait(PATIENCE_S)

    @property
    def text(self) -> str:
        return self.said.read_text()

    @property
    def left(self) -> list[int]:
        """What still runs of it and of the processes that it started."""
        return marked(self.mark)

    def computing(self, kind: bytes) -> list[int]:
        """Its engines or ranks."""
        return [pid for pid in self.left if kind in Path(f"/proc/{pid}/cmdline").read_bytes()]


@dataclass
class Meeting:
    """Where a run of a test listens, and the token that it shares."""

    folder: Path
    host: str = "127.0.0.1"
    notices: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token = self.folder / "token"
        self.token.touch(0o600)
        self.token.write_text("0123456789abcdef" * 3)
        with socket.create_server((self.host, 0)) as free:
            self.port = free.getsockname()[1]

    def settings(self, count: int, wait_s: float = PATIENCE_S) -> tuple[str, str]:
        """The job's section."""
        listen = f"'{self.host}:{self.port}'"
        return (
            "engine.nodes",
            f"{{listen: {listen}, token_file: {self.token}, count: {count}, wait_s: {wait_s}}}",
        )

    @contextmanager
    def nodes(self, count: int, token: Path | None = None) -> Iterator[list[Node]]:
        """Have so many processes join."""
        command = [sys.executable, "-m", "batchinfer", "worker", "--join", f"{self.host}:{self.port}"]
        command += ["--token-file", str(token or self.token), "--wait", str(PATIENCE_S)]
        found: list[Node] = []
        with ExitStack() as stack:
            for _ in range(count):
                mark = uuid.uuid4().hex
                said = stack.enter_context((self.folder / f"said-{mark}").open("wb"))
                process = subprocess.Popen(
                    command, stderr=said, start_new_session=True, env=environment(**{MARK: mark})
                )
                node = Node(process, mark, Path(said.name))
                stack.callback(_end, node)
                found.append(node)
            yield found


def _end(node: Node) -> None:
    for pid in node.left:
        os.kill(pid, signal.SIGKILL)
    node.process.wait()
