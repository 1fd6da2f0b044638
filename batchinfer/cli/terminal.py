"""Writes to the terminal: escapes text, adds colours, and survives a closed stdout or stderr."""

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
    """Print a text for users on stdout. Paths below the current folder are shown as relative paths.

    Args:
        text: The text. Control characters must be escaped already.

    Returns:
        False if the reader of stdout, such as `head`, has gone. Further output is then dropped.
    """
    return _write(sys.stdout, with_near_paths(text))


def say_verbatim(text: str) -> bool:
    """Print a text on stdout without any change, such as a user's prompt.

    Return False if the reader of stdout has gone.
    """
    return _write(sys.stdout, text)


def say_json(value: Mapping[str, Any]) -> bool:
    """Print an object as a line of JSON on stdout. Return False if the reader of stdout has gone."""
    return _write(sys.stdout, json_line(value))


def say_lines(lines: Iterable[str]) -> None:
    """Print lines on stdout, until the reader of stdout has gone.

    Args:
        lines: The lines. Control characters must be escaped already.
    """
    for line in lines:
        if not _write(sys.stdout, line, flush=False):
            return
    _write(sys.stdout, "", end="")


def tell(text: str) -> None:
    """Print a text for users on stderr. If stderr is closed, the text is dropped.

    Args:
        text: The text. Control characters must be escaped already.
    """
    try:
        _write(sys.stderr, with_near_paths(text))
    except OSError:  # for example a closed terminal; the exit code still reports the outcome
        return


def tell_error(text: str) -> None:
    """Print an error message on stderr, after the name of the program. Control characters are escaped."""
    tell(f"{paint('batchinfer:', 'bad', sys.stderr)} {printable(text)}")


def paint(text: str, look: Look | None = None, stream: TextIO | None = None) -> str:
    """Escape control characters in a text, and add colours if the stream shows colours.

    Args:
        text: The text.
        look: The style, or None for no colours.
        stream: The stream that the text is printed on. None for stdout.
    """
    safe = printable(text)
    return (
        typer.style(safe, **_STYLES[look]) if look and safe and shows_colours(stream or sys.stdout) else safe
    )


def is_terminal(stream: TextIO | None) -> bool:
    """Return True for a terminal. False for a pipe, a file, or None, a stream that was closed before the start."""
    return stream is not None and stream.isatty()


def shows_colours(stream: TextIO | None) -> bool:
    """Return True for a terminal with colours, unless NO_COLOR is set (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return False
    return is_terminal(stream)


def columns_of_terminal(stream: TextIO | None) -> int:
    """Return the width of the terminal in columns, or 80 if the stream is no terminal."""
    return shutil.get_terminal_size().columns if is_terminal(stream) else 80


def _write(stream: TextIO | None, text: str, *, end: str = "\n", flush: bool = True) -> bool:
    # False: the reader of the stream has gone
    if stream is None:  # closed before the start
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
    # Python would try to write the buffered output at exit, and fail again
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
