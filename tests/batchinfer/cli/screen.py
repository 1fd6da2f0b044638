"""Runs a process on a pseudo-terminal and returns the final screen."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests import warm_commands
from tests.batchinfer.wrong_jobs import hears_signals

COLUMNS = 100  # of the terminal; a constant, as an environment variable would need another interpreter
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def lines_on(text: str) -> list[str]:
    """Return the lines that a terminal shows after `text`. Handles returns, newlines, erased lines and colours."""
    lines, column = [""], 0
    for piece in re.findall(r"\x1b\[2K|\r|\n|[^\r\n\x1b]+|\x1b", _COLOUR.sub("", text)):
        if piece == "\n":
            lines.append("")
            column = 0
        elif piece == "\r":
            column = 0
        elif piece == "\x1b[2K":
            lines[-1] = ""
        else:
            line = lines[-1].ljust(column)
            lines[-1] = line[:column] + piece + line[column + len(piece) :]
            column += len(piece)
    return [line.rstrip() for line in lines if line.strip()]


@dataclass
class OnTerminal:
    """A process on a pseudo-terminal of the test. `text` is its output so far."""

    process: subprocess.Popen[bytes]
    master: int
    chunks: list[bytes] = field(default_factory=list)
    _reader: threading.Thread | None = None

    @property
    def text(self) -> str:
        return b"".join(self.chunks).decode(errors="replace")

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def close(self) -> None:
        os.close(self.master)
        self.master = -1

    def wait(self, seconds: float) -> int:
        code = self.process.wait(seconds)
        if self._reader is not None:
            self._reader.join(seconds)
        return code

    def read(self) -> None:
        """Collect the output until the terminal closes. Runs in a thread."""

        def gather(master: int) -> None:
            try:
                while chunk := os.read(master, 65536):
                    self.chunks.append(chunk)
            except OSError as error:  # Linux says so when the last writer has gone
                self.chunks.append(b"" if error.errno else b"?")

        self._reader = threading.Thread(target=gather, args=(self.master,), daemon=True)
        self._reader.start()


@contextmanager
def on_terminal(
    arguments: Sequence[str], folder: Path, env: dict[str, str], *, read: bool = True
) -> Iterator[OnTerminal]:
    """Run `python -m …` in a session whose terminal belongs to the test. It is killed when the block ends."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, COLUMNS))
    process = warm_commands.start(
        [sys.executable, "-m", "tests.batchinfer.cli.controlling", *arguments],
        cwd=folder, env=env, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=hears_signals,
    )  # fmt: skip
    os.close(slave)
    terminal = OnTerminal(process, master)
    if read:
        terminal.read()
    try:
        yield terminal
    finally:
        process.kill()
        process.wait()
        if terminal.master >= 0:
            terminal.close()
