"""Rules of the house that no linter checks: short functions, nothing unfinished, nothing swallowed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.parsed_sources import nodes

ROOT = Path(__file__).parents[1]
MEDIAN_LINES = 10
MEDIAN_MODULE_LINES = 50  # of each folder of the rooms below
MERGED_ROOMS = ("batchinfer/engine", "batchinfer/models", "batchinfer/plan")
LONGEST_FUNCTION = 60  # outside of kernels, whose inner loops read better in one piece
# Split, as this file must not find itself
UNFINISHED = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"]))
PLACES = re.compile(
    "|".join([r"(?<![\w.-])/work/(?:main|shared)\b", "/tmp/" + "bi/", r"(?<!\w)\.lib" + "rary/"])
)
# Commands that install the package of this name from PyPI, which is another project's; and extras of that package
STRANGER = re.compile(
    r"(?:\b(?:pip3?|uv|pipx) (?:tool |pip )?(?:install|add|download|run)|\buvx)"
    r"(?: -\S+(?: [\w.]+)?)* [\"']?batchinfer\b"
    r"|\bbatchinfer(?:-engine)?\[[a-z{]"
)
WATCHED = (".py", ".c", ".h", ".md", ".toml", ".yaml", ".yml", ".txt", ".cfg")
FOLDERS = ("batchinfer", "kernels", "tests", "docs", "jobs", ".ci", ".github")
# Words that start a fragment instead of a sentence, as in "Of codes."
CLAUSES = frozenset(
    ["also", "and", "but", "ditto", "likewise", "of", "or", "see", "those", "what", "which", "whose"]
)
# These may open a sentence, as in "With look-ahead, a step is prepared early.", but then a comma follows
PHRASES = frozenset(
    ["among", "as", "at", "because", "beside", "besides", "by", "for", "from", "in", "on",
     "per", "than", "these", "under", "where", "with", "within", "without"]
)  # fmt: skip
REPEATS = re.compile(r"the same(?:[,.;:]| (?:as|but|by|for|from|in|of|on|that|with)\b)", re.IGNORECASE)
FEWEST_WORDS = 3


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def texts() -> Iterator[Path]:
    """Yield the files that a reader of the repository sees, without files of tools."""
    for folder in FOLDERS:
        yield from (p for p in sorted((ROOT / folder).rglob("*")) if p.is_file() and _watched(p))
    yield from (p for p in sorted(ROOT.iterdir()) if p.is_file() and _watched(p))


def _watched(path: Path) -> bool:
    return path.suffix in WATCHED or path.name in ("Makefile", "run", "LICENSE")


def functions(source: str) -> list[tuple[str, int]]:
    """Return (name, lines) of every function, including docstring and signature."""
    found = nodes(source, ast.FunctionDef, ast.AsyncFunctionDef)
    return [(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in found]


def swallowed(source: str) -> list[int]:
    """Return the lines of handlers that catch everything without raising again, or do nothing at all."""
    return [
        node.lineno for node in nodes(source, ast.ExceptHandler) if _catches_all(node) or _does_nothing(node)
    ]


def _catches_all(handler: ast.ExceptHandler) -> bool:
    everything = handler.type is None or ast.unparse(handler.type) == "BaseException"
    return everything and not any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def _does_nothing(handler: ast.ExceptHandler) -> bool:
    return all(isinstance(node, ast.Pass) or _is_constant(node) for node in handler.body)


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def shared_names(files: dict[str, str]) -> dict[str, list[str]]:
    """Return the classes that several files define, or one file twice, with the names of these files."""
    found: dict[str, list[str]] = {}
    for name, source in files.items():
        for node in nodes(source, ast.ClassDef):
            found.setdefault(node.name, []).append(name)
    return {name: places for name, places in found.items() if len(places) > 1}


def headless(docstring: str) -> bool:
    """Return True if the first words of a docstring are a fragment instead of a sentence."""
    sentence = re.split(r"(?<=[.!?])\s|\n\s*\n", docstring.strip(), maxsplit=1)[0]
    words = sentence.split()
    first = words[0].strip(",:").lower()
    if len(words) < FEWEST_WORDS:
        return first != "raises"
    opening, comma, _ = sentence.partition(",")
    opens = bool(comma) and ":" not in opening
    return first in CLAUSES or (first in PHRASES and not opens) or bool(REPEATS.match(sentence))


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of a file, each with the line of its function or class."""
    for node in nodes(source, ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef):
        if text := ast.get_docstring(node):
            yield getattr(node, "lineno", 1), text


def room(path: Path) -> str:
    """Return the folder of `batchinfer/` that a file is in, or `kernels`."""
    top, *rest = path.relative_to(ROOT).parts
    return rest[0] if top == "batchinfer" and len(rest) > 1 else top


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_median_function_is_short() -> None:
    lengths = [length for path in sources("batchinfer") for _, length in functions(path.read_text("utf-8"))]
    assert median(lengths) <= MEDIAN_LINES


def test_no_function_is_long() -> None:
    found = [
        f"{named(path)} {name}: {length} lines"
        for path in sources("batchinfer")
        for name, length in functions(path.read_text("utf-8"))
        if length > LONGEST_FUNCTION
    ]
    assert found == []


def test_folders_are_not_split_too_finely() -> None:
    """One noun per file, but a reader does not open a file per definition."""
    lengths: dict[str, list[int]] = {}
    for path in sources(*MERGED_ROOMS):
        if path.name != "__init__.py":
            lengths.setdefault(named(path.parent), []).append(len(path.read_text("utf-8").splitlines()))
    small = {folder: median(each) for folder, each in lengths.items() if median(each) < MEDIAN_MODULE_LINES}
    assert small == {}


def test_nothing_is_swallowed() -> None:
    found = [
        f"{named(path)}:{line}"
        for path in sources("batchinfer", "kernels", "jobs")
        for line in swallowed(path.read_text("utf-8"))
    ]
    assert found == []


def test_no_two_classes_share_a_name() -> None:
    """A class name is unambiguous without a look at the imports."""
    assert shared_names({named(p): p.read_text("utf-8") for p in sources("batchinfer", "kernels")}) == {}


def test_a_shared_name_is_caught() -> None:
    files = {"a.py": "class Plan: ...", "b.py": "def f():\n    class Plan: ...", "c.py": "class Plans: ..."}
    assert shared_names(files) == {"Plan": ["a.py", "b.py"]}


def test_docstrings_have_a_subject_and_a_verb() -> None:
    found: dict[str, list[str]] = {}
    for path in sources("batchinfer", "kernels"):
        for line, text in docstrings(path.read_text("utf-8")):
            if headless(text):
                found.setdefault(room(path), []).append(f"{named(path)}:{line}: {text.splitlines()[0]}")
    assert found == {}, "describe the thing or its action in a sentence"


@pytest.mark.parametrize(
    "text",
    ["Of codes.", "In words.", "See Source.", "The same, but exact.", "Those that wait.", "What it holds.",
     "As config.json states it; else none.", "For people: when it is, and how.", "Where the results go."],
)  # fmt: skip
def test_a_headless_docstring_is_caught(text: str) -> None:
    assert headless(text)


@pytest.mark.parametrize(
    "text",
    ["Return the rows.", "Whether a row is done.", "The same command continues a run.", "Raises UsageError.",
     "With look-ahead, a step is prepared early.", "A list of items. Of one kind."],
)  # fmt: skip
def test_a_docstring_with_a_head_is_fine(text: str) -> None:
    assert not headless(text)


@pytest.mark.parametrize(
    ("pattern", "meaning"),
    [
        (UNFINISHED, "unfinished work"),
        (PLACES, "a path of one machine"),
        (STRANGER, "installs another project's package"),
    ],
)
def test_no_text_holds(pattern: re.Pattern[str], meaning: str) -> None:
    found = [
        f"{named(path)}:{number}: {meaning}: {match.group()}"
        for path in texts()
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1)
        if (match := pattern.search(line))
    ]
    assert found == []


@pytest.mark.parametrize(
    "command",
    ["pip install {}[gpu]", "pipx install {}", "uv tool install --python 3.12 {}", "uv pip install '{}'", "uvx {}",
     "`{}-engine[quack]`"],
)  # fmt: skip
def test_commands_that_install_another_projects_package_are_found(command: str) -> None:
    assert STRANGER.search(command.format("batchinfer"))


@pytest.mark.parametrize(
    "handler",
    [
        "except:\n    x = 1",
        "except ValueError:\n    pass",
        "except OSError:\n    ...",
        "except BaseException:\n    x()",
    ],
)
def test_a_swallowing_handler_is_caught(handler: str) -> None:
    assert swallowed(f"try:\n    f()\n{handler}\n") == [3]


def test_a_handler_that_acts_is_fine() -> None:
    for handler in ("except OSError:\n    x = None", "except BaseException:\n    close()\n    raise"):
        assert swallowed(f"try:\n    f()\n{handler}\n") == []


def test_lengths_count_signature_and_docstring() -> None:
    assert functions('def f(\n    a,\n):\n    """x"""\n    return a\n') == [("f", 5)]
