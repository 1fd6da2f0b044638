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
    """Return True if an SQL text ends with a `;` that is not in a quoted text, a quoted name or a comment.

    The prompt then runs the text instead of asking for another line.
    """
    last = ""
    for found in _PIECE.finditer(text):
        piece = found.group()
        if _BEGINNING.fullmatch(piece):
            return False
        if not piece.isspace() and not piece.startswith(("--", "/*")):
            last = piece
    return last == ";"


def history_file(env: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the file that keeps the queries which the user has typed.

    It is `${XDG_STATE_HOME:-~/.local/state}/batchinfer/query_history`.
    """
    base = env.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(base) / "batchinfer" / "query_history"


def converse(result: OpenResult, form: str, escape_formulas: bool = False) -> None:
    """Read queries from stdin and print their answers, until the input ends.

    On a terminal, an error is printed, and the next query can be typed. If stdin is a pipe, an error is raised, and
    without any query the default query runs.

    Args:
        result: The tables to query.
        form: The format of the answers.
        escape_formulas: True to put an apostrophe before CSV cells that spreadsheet programs would run as formulas.
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
    # False leaves the prompt
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
    # The history file is only readable for the user; without readline there is none
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
    # Errors of the history file are printed and not raised, because queries still work
    try:
        yield
    except OSError as error:
        tell(
            printable(
                f"{path}: the history of typed queries cannot be kept ({error}); queries work all the same"
            )
        )
