"""Writing to the terminal: texts are escaped, coloured where wanted, and a failed write never loses an outcome."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TextIO

import typer

from batchinfer.core.text import json_line, printable, with_near_paths

Look = Literal["heading", "good", "bad", "quiet"]
_STYLES: dict[Look, dict[str, Any]] = {
    "heading": {"bold": True},
    "good": {"fg": "green", "bold": True},
    "bad": {"fg": "red", "bold": True},
    "quiet": {"dim": True},
}


def say(text: str) -> bool:
    """Print a text of ours, which is printable already, on stdout; paths below the current folder become relative.

    False when nobody reads it: the rest of the output is dropped."""
    return _write(sys.stdout, with_near_paths(text))


def say_verbatim(text: str) -> bool:
    """Print on stdout what holds texts of the user's, such as a prompt, in which nothing may be changed."""
    return _write(sys.stdout, text)


def say_json(value: Mapping[str, Any]) -> bool:
    """Print one line of JSON on stdout."""
    return _write(sys.stdout, json_line(value))


def say_lines(lines: Iterable[str]) -> None:
    """Print lines that are printable already on stdout, until nobody reads them any more."""
    for line in lines:
        if not _write(sys.stdout, line, flush=False):
            return
    _write(sys.stdout, "", end="")


def tell(text: str) -> None:
    """Print what is printable already on stderr; where that fails, nobody is left to tell."""
    try:
        _write(sys.stderr, with_near_paths(text))
    except OSError:  # e.g. a terminal that was closed; the exit code still says how it ended
        return


def tell_error(text: str) -> None:
    """Print an error message on stderr."""
    tell(f"{painted('batchinfer:', 'bad', sys.stderr)} {printable(text)}")


def painted(text: str, look: Look | None = None, stream: TextIO | None = None) -> str:
    """`text`, made printable, looking like `look` where the stream (stdout by default) shows colours."""
    safe = printable(text)
    return (
        typer.style(safe, **_STYLES[look]) if look and safe and shows_colours(stream or sys.stdout) else safe
    )


def is_terminal(stream: TextIO | None) -> bool:
    """Return True for a terminal; False for a pipe, a file, and a stream that was closed before the command started."""
    return stream is not None and stream.isatty()


def shows_colours(stream: TextIO | None) -> bool:
    """A terminal that is not dumb, and nobody asked for no colours (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return False
    return is_terminal(stream)


def columns_of_terminal(stream: TextIO | None) -> int:
    """Return the width for lines on a stream: the terminal's, or 80 columns without a terminal."""
    return shutil.get_terminal_size().columns if is_terminal(stream) else 80


def _write(stream: TextIO | None, text: str, *, end: str = "\n", flush: bool = True) -> bool:
    """Raises OSError when the stream cannot be written for another reason than that its reader has gone."""
    if stream is None:  # closed before we started
        return False
    try:
        stream.write(text + end)
        if flush:
            stream.flush()
    except BrokenPipeError:
        _drop(stream)
        return False
    except OSError:
        _drop(stream)
        raise
    return True


def _drop(stream: TextIO) -> None:
    """Send what is still buffered nowhere: Python writes it at its end, and would fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
