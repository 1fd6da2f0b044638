"""Reads a job file into plain values, each with its origin: a line of the file, or a --set option."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from batchinfer.core.errors import InputMissing, JobFileError, Mistake
from batchinfer.job.variables import HOLE, Variables
from batchinfer.job.yaml_tree import UNUSABLE, Finding, Loc, Node, read_yaml, shorten

MAX_BYTES = 1 << 20  # maximum size; the longest prompts have a few hundred KB


@dataclass(frozen=True, slots=True)
class Place:
    """The place where the user set a value: a line of the job file, or a --set option.

    Attributes:
        line: The line of the value's key, from 1, or None if unknown.
        override: The key of the --set option as a tuple, such as ("output", "path"), or None.
        text_line: For a text block (`|`), the line where the text begins, else None.
    """

    line: int | None
    override: Loc | None = None
    text_line: int | None = None


@dataclass(frozen=True, slots=True)
class JobFile:
    """A job file as plain values: dict, tuple, str, int, float, bool or None.

    A location is a tuple of keys and positions, such as ("output", "columns", 1).

    Attributes:
        path: The file.
        values: The values by section.
        places: The line or --set option that set each value, by location.
        mistakes: The mistakes found while reading the file.
        broken: The locations of values with a known mistake. Further mistakes of these values are not reported.
        dated: The texts that contain ${date}, by location. Each ${date} is replaced by the character HOLE.
    """

    path: Path
    values: dict[str, Any]
    places: dict[Loc, Place]
    mistakes: tuple[Mistake, ...]
    broken: frozenset[Loc]
    dated: dict[Loc, str]

    @property
    def folder(self) -> Path:
        """Return the folder that relative paths start from."""
        return self.path.parent

    def lines(self) -> dict[str, int]:
        """Return the line (from 1) of each dotted key, such as "output.path"."""
        return {dotted(loc): place.line for loc, place in self.places.items() if place.line and _is_key(loc)}

    def mistake(self, finding: Finding) -> Mistake:
        """Convert a finding to a Mistake for users, which names the line or the `--set` option that set the value."""
        place = self.place(finding.loc)
        where = dotted(finding.loc)
        if place.override is None:
            return Mistake(where, finding.message, finding.line or place.line, finding.hint)
        inner = f"{where}: " if where != dotted(place.override) else ""
        return Mistake(f"--set {dotted(place.override)}", inner + finding.message, None, finding.hint)

    def without_lines(self) -> JobFile:
        """Return a copy of the job file in which values and mistakes have no line numbers."""
        places = {loc: replace(place, line=None, text_line=None) for loc, place in self.places.items()}
        return replace(self, places=places, mistakes=tuple(replace(one, line=None) for one in self.mistakes))

    def place(self, loc: Loc) -> Place:
        """Return where the value at a location was set.

        If unknown, return where the nearest value around it was set.
        """
        for length in range(len(loc), 0, -1):
            if loc[:length] in self.places:
                return self.places[loc[:length]]
        return Place(None)


def _is_key(loc: Loc) -> bool:
    return all(isinstance(part, str) for part in loc)


def dotted(loc: Iterable[str | int]) -> str:
    """Return the keys of a location, joined by dots: ("output", "columns", 1) is `output.columns`.

    Unusual keys are quoted.
    """
    names = (part for part in loc if isinstance(part, str))
    return ".".join(name if re.fullmatch(r"[\w-]{1,60}", name) else shorten(name) for name in names)


def read_job_file(path: Path, overrides: Sequence[tuple[str, str]], variables: Variables) -> JobFile:
    """Read a job file, and apply the overrides of the command line.

    Args:
        path: The job file.
        overrides: Pairs of a dotted key and YAML text, as for `--set`.
        variables: The values of variables such as ${date} in texts of the file.

    Raises:
        InputMissing: The file does not exist.
        JobFileError: The file is unreadable, not UTF-8, not YAML, empty, or not a mapping.
    """
    if (shown := not_utf8(path)) is not None:
        message = (
            "the path of the job file holds bytes that are not UTF-8, and paths in it start from its folder"
        )
        raise JobFileError(shown, [Mistake("", message, None, "rename the folder or the file")])
    return read_job_text(path, _read_text(path), overrides, variables)


def read_job_values(
    path: Path, given: Mapping[str, Any], overrides: Sequence[tuple[str, str]], variables: Variables
) -> JobFile:
    """Convert a mapping of sections as if it were the content of a job file, and apply the overrides.

    Args:
        path: A name for the mapping in messages. Relative paths start from its folder.
        given: The values by section.
        overrides: Pairs of a dotted key and YAML text, as for `--set`.
        variables: The values of variables such as ${date} in texts.

    Returns:
        The values. They have no line numbers.

    Raises:
        JobFileError: A value is invalid, or cannot be in a job file.
    """
    try:
        text = json.dumps(given, default=_path_text, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        message = "each key must be a text, each value a text, number, path, True, False, None, list or dict of these"
        raise JobFileError(str(path), [Mistake("", f"{error}; {message}")]) from None
    try:
        return read_job_text(path, text, overrides, variables).without_lines()
    except JobFileError as error:
        raise JobFileError(error.path, [replace(one, line=None) for one in error.mistakes]) from None


def _path_text(value: Any) -> str:
    if isinstance(value, os.PathLike) and isinstance(text := os.fspath(value), str):
        return text
    raise TypeError(f"found {shorten(repr(value))}, a {type(value).__name__}")


def read_job_text(
    path: Path, text: str, overrides: Sequence[tuple[str, str]], variables: Variables
) -> JobFile:
    """Parse the text of a job file, and apply the overrides of the command line.

    Args:
        path: The job file, for messages and relative paths.
        text: Its text.
        overrides: Pairs of a dotted key and YAML text, as for `--set`.
        variables: The values of variables such as ${date} in texts of the file.

    Raises:
        JobFileError: The text is not YAML, empty, or not a mapping.
    """
    root, findings = read_yaml(text)
    values = _Values(variables)
    if root is not None and isinstance(root.value, dict):
        values.take(root)
    elif root is not None or not findings:
        findings.append(_not_a_job(root))
    if not values.root and findings:
        raise JobFileError(str(path), [_plain(finding) for finding in findings])
    laid = [mistake for key, value in overrides for mistake in values.override(key, value)]
    mistakes = [*(_plain(finding) for finding in [*findings, *values.findings]), *laid]
    return JobFile(path, values.root, values.places, tuple(mistakes), frozenset(values.broken), values.dated)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputMissing(_no_job_file(path)) from error
    except (OSError, ValueError) as error:
        if path.is_dir():
            raise InputMissing(_no_job_file(path / "job.yaml")) from error
        reason = error.strerror if isinstance(error, OSError) else str(error)
        mistake = Mistake("", f"the job file cannot be read: {reason}")
        raise JobFileError(str(path), [mistake]) from error
    if len(data) > MAX_BYTES:
        mistake = Mistake(
            "", f"a job file has at most {MAX_BYTES:,} bytes", None, "rows belong into input files"
        )
        raise JobFileError(str(path), [mistake])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        mistake = Mistake(
            "", f"the byte 0x{data[error.start]:02x} is not UTF-8", line, "save the file as UTF-8"
        )
        raise JobFileError(str(path), [mistake]) from error


def _no_job_file(path: Path) -> str:
    held = sorted(one.name for suffix in ("*.yaml", "*.yml") for one in path.parent.glob(suffix))
    near = difflib.get_close_matches(path.name, held, 1) or held[:1]
    if near:
        return f"there is no job file {path}; did you mean {path.with_name(near[0])}?"
    return f"there is no job file {path}; name one, or `batchinfer init DIR` writes one to start from"


def _not_a_job(root: Node | None) -> Finding:
    hint = "`batchinfer init DIR` writes a job file to start from"
    if root is None or root.value is None:
        return Finding((), "the job file is empty", hint)
    kind = "a list" if isinstance(root.value, tuple) else "a single value"
    return Finding(
        (), f"found {kind}; a job file is a mapping of sections (model, input, …)", hint, root.line
    )


def _plain(finding: Finding) -> Mistake:
    return Mistake(dotted(finding.loc), finding.message, finding.line, finding.hint)


@dataclass(slots=True)
class _Values:
    # Collects the values of the job file first, then of each override. JobFile explains the fields.
    variables: Variables
    root: dict[str, Any] = field(default_factory=dict)
    places: dict[Loc, Place] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    broken: set[Loc] = field(default_factory=set)
    dated: dict[Loc, str] = field(default_factory=dict)

    def take(self, root: Node) -> None:
        self.root = self._value(root, (), None)

    def override(self, key: str, text: str) -> list[Mistake]:
        """Apply the option `--set key=text` to the values, and return its mistakes."""
        loc = tuple(UNUSABLE.sub("\ufffd", key).split("."))
        node, findings = read_yaml(text)
        if not all(loc):
            message = "names no option; write SECTION.KEY=VALUE, as in engine.max_num_seqs=64"
            findings.append(Finding((), message))
        elif not findings:
            findings += self._lay(loc, node)
        return [Mistake(f"--set {dotted(loc)}", one.message, None, one.hint) for one in findings]

    def _lay(self, loc: tuple[str, ...], node: Node | None) -> list[Finding]:
        self._forget(loc)
        known, self.findings = self.findings, []
        value = None if node is None else self._value(node, loc, loc)
        self.places[loc] = Place(None, loc)
        mine, self.findings = self.findings, known
        return mine + self._put(loc, value)

    def _put(self, loc: tuple[str, ...], value: Any) -> list[Finding]:
        at = self.root
        for depth, part in enumerate(loc[:-1], 1):
            if at.get(part) is None:
                at[part] = {}
                self.places.setdefault(loc[:depth], Place(None, loc))
            if not isinstance(at[part], dict):
                return [Finding((), f"{dotted(loc[:depth])} is a value, not a section with keys of its own")]
            at = at[part]
        at[loc[-1]] = value
        return []

    def _forget(self, loc: Loc) -> None:
        self.places = {at: place for at, place in self.places.items() if at[: len(loc)] != loc}
        self.broken = {at for at in self.broken if at[: len(loc)] != loc}
        self.dated = {at: text for at, text in self.dated.items() if at[: len(loc)] != loc}
        self.findings = [finding for finding in self.findings if finding.loc[: len(loc)] != loc]

    def _value(self, node: Node, loc: Loc, override: Loc | None) -> Any:
        if isinstance(node.value, dict):
            for key, entry in node.value.items():
                self._place((*loc, key), entry.line, entry.node, override)
            return {k: self._value(entry.node, (*loc, k), override) for k, entry in node.value.items()}
        if isinstance(node.value, tuple):
            for at, item in enumerate(node.value):
                self._place((*loc, at), item.line, item, override)
            return tuple(self._value(item, (*loc, at), override) for at, item in enumerate(node.value))
        return self._expanded(node.value, loc) if isinstance(node.value, str) else node.value

    def _place(self, loc: Loc, line: int, node: Node, override: Loc | None) -> None:
        here = Place(line, None, node.text_line) if override is None else Place(None, override)
        self.places[loc] = here

    def _expanded(self, text: str, loc: Loc) -> str:
        value, problems = self.variables.expand(text)
        if "${date" in text:
            undated = replace(self.variables, date=HOLE).expand(text)[0]
            self.dated |= {loc: undated} if HOLE in undated else {}
        place = self.places.get(loc, Place(None))
        for problem in problems:
            line = place.line
            if place.text_line is not None:
                line = place.text_line + text.count("\n", 0, problem.offset)
            self.findings.append(Finding(loc, problem.message, problem.hint, line))
        if UNUSABLE.search(value):
            self.findings.append(
                Finding(loc, "a variable in it holds bytes that are not UTF-8", None, place.line)
            )
        if problems or UNUSABLE.search(value):
            self.broken.add(loc)
        return UNUSABLE.sub("\ufffd", value)


def not_utf8(path: str | os.PathLike[str]) -> str | None:
    """Return None for a path in UTF-8. Otherwise return it with escaped bytes, for a message.

    pyarrow and DuckDB do not support such paths.
    """
    data = os.fsencode(path)
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("utf-8", "backslashreplace")
    return None


def job_file_in(path: Path) -> Path:
    """Return the file job.yaml in the folder `path`. Return `path` itself if it has none, or is a file."""
    held = path / "job.yaml"
    return held if held.is_file() else path


def absolute(folder: Path, text: str) -> str:
    """Return `text`, a path relative to `folder`, as an absolute path. `..` is resolved; links and globs are kept."""
    return os.path.normpath(os.path.join(folder, text))
