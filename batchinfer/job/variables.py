"""Expands the variables of a job file: ${VAR}, ${VAR:-default}, ${date}, and $$ for a plain $."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from batchinfer.job.yaml_tree import shorten

# Maximum characters of a text after expansion. Limits what a job file can make of a long variable.
MAX_TEXT = 1 << 20
# Replaces ${date} in texts from which the date is removed. Unicode reserves this code point for internal use.
HOLE = "\ufdd0"

# ${{, ${% and ${# are a dollar before Jinja's own marks, and are not expanded
_VARIABLE = re.compile(r"\$(?:\$|\{(?![{%#])(?P<inner>[^{}\n]*)(?P<end>\}?))")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Unexpanded:
    """The reason why a variable in a text of the job file could not be expanded.

    Attributes:
        offset: The position of the variable in the text.
        message: The problem.
        hint: Advice for the user.
    """

    offset: int
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class Variables:
    """The values of the variables, such as ${date}, that texts in a job file may contain.

    Attributes:
        date: The value of ${date}, as YYYY-MM-DD, even if there is an environment variable `date`.
        env: The environment variables, which are the other variables.
    """

    date: str
    env: Mapping[str, str]

    def expand(self, text: str) -> tuple[str, list[Unexpanded]]:
        """Replace the variables in a text, such as ${date} or ${HOME}, by their values.

        Returns:
            (expanded text, problems): one problem for each variable that could not be expanded. The text is "" if it
            would exceed MAX_TEXT (1 Mi) characters.
        """
        if "$" not in text:
            return text, []
        pieces: list[str] = []
        problems: list[Unexpanded] = []
        end = length = 0
        for match in _VARIABLE.finditer(text):
            value = self._value(match)
            if isinstance(value, Unexpanded):
                problems.append(value)
                value = match[0]
            pieces += [text[end : match.start()], value]
            end = match.end()
            length += len(value)
            if length > MAX_TEXT:
                message = f"the text grows over {MAX_TEXT:,} characters once its variables are replaced"
                return "", [*problems, Unexpanded(match.start(), message, "use shorter variables")]
        return "".join([*pieces, text[end:]]), problems

    def _value(self, match: re.Match[str]) -> str | Unexpanded:
        inner = match["inner"]
        if inner is None:
            return "$"
        name, dash, default = inner.partition(":-")
        if not match["end"] or not _NAME.fullmatch(name):
            message = f"{shorten(match[0])} is not a variable; write ${{NAME}} or ${{NAME:-default}}"
            return Unexpanded(match.start(), message, "write $$ for a plain dollar sign")
        if name == "date":
            return self.date
        value = self.env.get(name, "")
        if value or dash:
            return value or default
        if name in self.env:
            return value
        message = f"the environment variable {name} is not set and ${{{name}}} has no default"
        return Unexpanded(
            match.start(), message, f"set it, or write ${{{name}:-default}}; $$ is a plain dollar sign"
        )
