"""An interactive SQL prompt. Also reads queries from a pipe."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from batchinfer.cli.terminal import paint, say, say_lines, tell, tell_error
from batchinfer.core.errors import BatchInferError, Interrupted
from batchinfer.core.text import printable
from batchinfer.machine.folders import make_folder
from batchinfer.report.tables.queried import QUERIED
from batchinfer.verbs.answer import answer_lines
from batchinfer.verbs.query import OpenResult

PROMPT, MORE = "batchinfer> ", "       ...> "
MOST_KEPT = 1000  # maximum lines of history
HELP = """\
Type a query in DuckDB's SQL and end it with ; (it may have several lines). Queries only read, they change nothing.
.tables   list the tables, with the meaning of a row in each
.help     show this text
.quit     leave (also Ctrl-D); Ctrl-C discards what is typed, or stops a running query"""
# A quoted text, a quoted name, a text between dollars, or a comment; the start of an unfinished one; another character
_PIECE = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|\$(\w*)\$.*?\$\1\$|--[^\n]*|/\*.*?\*/|['"]|/\*|\$\w*\$|.""", re.DOTALL
)
_BEGINNING = re.compile(r"""['"]|/\*|\$\w*\$""")


def is_whole(text: str) -> bool:
    """Return True if an SQL text ends with a `;` outside of quoted texts, quoted names and comments."""
    last = ""
    for found in _PIECE.finditer(text):
        piece = found.group()
        if _BEGINNING.fullmatch(piece):
            return False
        if not piece.isspace() and not piece.startswith(("--", "/*")):
            last = piece
    return last == ";"


def history_file(env: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the history of typed queries: `${XDG_STATE_HOME:-~/.local/state}/batchinfer/query_history`."""
    base = env.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(base) / "batchinfer" / "query_history"


def converse(result: OpenResult, form: str, escape_formulas: bool = False) -> None:
    """Read queries from stdin and print their answers, until the input ends.

    On a terminal, an error is printed, and the next query can be typed. On a pipe, an error is raised. A pipe without
    any query gets the default query.

    Args:
        result: The tables to query.
        form: The format of the answers.
        escape_formulas: True to escape formulas in CSV.
    """
    if sys.stdin is not None and sys.stdin.isatty():
        with _history(history_file()):
            _at_terminal(result, form, escape_formulas)
    else:
        _from_pipe(result, form, escape_formulas, sys.stdin)


def _at_terminal(result: OpenResult, form: str, escape_formulas: bool) -> None:
    say(paint("Type SQL and end it with ; to run it. .help explains more, .quit leaves.", "quiet"))
    typed = ""
    while True:
        try:
            typed += input(MORE if typed else PROMPT) + "\n"
            if not typed.strip():
                typed = ""
            elif typed.lstrip().startswith("."):
                command, typed = typed.strip(), ""
                if not _command(command, result):
                    return
            elif is_whole(typed):
                text, typed = typed, ""
                _answer(result, text, form, escape_formulas)
        except EOFError:
            say("")
            return
        except Interrupted as error:
            if error.exit_code != 128 + signal.SIGINT:
                raise
            typed = ""
            say("")
        except BatchInferError as error:
            tell_error(str(error))


def _from_pipe(result: OpenResult, form: str, escape_formulas: bool, stream: TextIO | None) -> None:
    typed, any_yet = "", False
    for line in stream or ():
        if not typed and line.startswith("."):
            any_yet = True
            if not _command(line.strip(), result):
                return
            continue
        typed = (typed + line) if typed or line.strip() else ""
        if is_whole(typed):
            _answer(result, typed, form, escape_formulas)
            typed, any_yet = "", True
    if typed.strip() or not any_yet:
        _answer(result, typed if typed.strip() else result.usual, form, escape_formulas)


def _answer(result: OpenResult, text: str, form: str, escape_formulas: bool) -> None:
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    for sql in result.statements(text):
        with result.answer(sql) as answer:
            lines = answer_lines(answer, form, width, escape_formulas)
            say_lines(map(printable, lines) if terminal else lines)


def _command(text: str, result: OpenResult) -> bool:
    """Run a dot command such as ".tables". Return False if the command leaves the prompt."""
    if text in (".quit", ".exit"):
        return False
    if text == ".tables":
        say_lines(f"{name:<12}{QUERIED[name]}" for name in result.names)
    elif text == ".help":
        say(HELP)
    else:
        tell(printable(f"{text}: no such command; there are .tables, .help and .quit"))
    return True


@contextmanager
def _history(path: Path) -> Iterator[None]:
    """Keep the lines that are typed in the `with` block in a history file that only the user may read.

    Does nothing without readline.
    """
    if find_spec("readline") is None:
        yield
        return
    import readline  # enables line editing in input()

    readline.set_history_length(MOST_KEPT)
    with _telling(path):
        if path.exists():
            readline.read_history_file(path)
    yield
    with _telling(path):
        make_folder(path.parent, 0o700)
        path.touch(mode=0o600)
        readline.write_history_file(path)


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    """Print errors of the history file instead of raising them, because queries still work."""
    try:
        yield
    except OSError as error:
        tell(
            printable(
                f"{path}: the history of typed queries cannot be kept ({error}); queries work all the same"
            )
        )
