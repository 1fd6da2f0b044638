"""Generates the tables of the reference pages from the code: keys of the job file, columns, and options.

`python -m tests.reference` (or `make reference`) rewrites the tables between `<!-- KIND: NAME, … -->` and
`<!-- end -->`. All other text of the pages is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from batchinfer.cli import app
from batchinfer.job import Job
from batchinfer.job.wording import options, section_of
from batchinfer.report.tables.columns.declared import COLUMNS
from batchinfer.report.tables.exit_status import MEANINGS

DOCS = Path(__file__).parents[1] / "docs"
FIX = "run `make reference`"
_SHORT = 50  # characters of a description that is repeated
_ENTRIES = " ('entries')"  # pyarrow's note in the names of map types
_BLOCK = re.compile(r"<!-- (\w+): ([^>]*) -->\n.*?<!-- end -->", re.DOTALL)


def keys(section: str) -> Iterator[str]:
    """Yield the rows of the keys of a section; `job` has the keys of no section."""
    yield from ("| key | default | |", "|---|---|---|")
    if section == "job":
        listed = {key: info for key, info in options(Job).items() if key not in SECTIONS or key == "drafts"}
        yield from (_key_row(key, info) for key, info in listed.items())
    else:
        yield from _section_rows(SECTIONS[section], section)


def _section_rows(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for key, info in options(section).items():
        yield _key_row(f"{prefix}.{key}", info)
        if inner := section_of(section, key):
            yield from _section_rows(inner, f"{prefix}.{key}")


def _key_row(key: str, info: FieldInfo) -> str:
    return f"| `{key}` | {_default(info)} | {info.description} |"


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    extra = info.json_schema_extra
    default = extra["default"] if isinstance(extra, dict) and "default" in extra else info.default
    if isinstance(default, float) and default.is_integer():
        default = int(default)
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def columns(table: str) -> Iterator[str]:
    """Yield the rows of the columns of a report table. Numbers with a unit have no type."""
    yield from ("| column | unit or type | meaning |", "|---|---|---|")
    for column in COLUMNS[table]:
        kind = "timestamp UTC" if pa.types.is_timestamp(column.type) else str(column.type)
        number = kind in ("int64", "double")
        unit = column.unit if number and column.unit else kind.removesuffix(_ENTRIES)
        yield f"| `{column.name}` | {unit} | {column.meaning} |"


def statuses(_: str) -> Iterator[str]:
    """Yield the rows of all values of `exit_status`."""
    yield from ("| `exit_status` | meaning |", "|---|---|")
    yield from (f"| `{status}` | {meaning} |" for status, meaning in MEANINGS.items())


def verb_options(verb: str) -> Iterator[str]:
    """Yield the rows of the arguments and options of a verb. Options of `run` are described only there."""
    yield from ("| argument or option | |", "|---|---|")
    shared = {} if verb == "run" else {one.name: one.help for one in VERBS["run"].params}
    same = []
    for parameter in VERBS[verb].params:
        if parameter.name == "help":
            continue
        names = _written(parameter)
        if shared.get(parameter.name) == parameter.help and len(parameter.help) > _SHORT:
            same.append(names)
        else:
            default = "" if parameter.default in (None, False) else f" Default: `{parameter.default}`."
            yield f"| {names} | {parameter.help}{default} |"
    if same:
        yield f"| {', '.join(same)} | As for [`run`](#run). |"


def _written(parameter: Any) -> str:
    """Return an argument or an option as users write it."""
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar}`"
    value = f" {parameter.metavar}" if parameter.metavar else ""
    return ", ".join(f"`{option}{value}`" for option in parameter.opts)


def _verbs() -> dict[str, Any]:
    """Return all verbs by their names, as in `schema infer`."""
    found = {}
    for name, verb in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        found[name] = verb
        found |= {f"{name} {inner}": one for inner, one in getattr(verb, "commands", {}).items()}
    return found


VERBS = _verbs()
SECTIONS = {key: inner for key in options(Job) if (inner := section_of(Job, key))}
# For each kind: the names of all tables, and a function that returns the lines of a table
KINDS: dict[str, tuple[Iterable[str], Callable[[str], Iterable[str]]]] = {
    "keys": (("job", *SECTIONS), keys),
    "columns": (COLUMNS, columns),
    "statuses": (("all",), statuses),
    "options": ([name for name, verb in VERBS.items() if name != "schema"], verb_options),
}
PAGES = {"job-file.md": ("keys",), "report.md": ("columns", "statuses"), "cli.md": ("options",)}


def generated(text: str) -> str:
    """Return the text of a page with its tables as the code has them. A block may have several tables."""

    def block(found: re.Match[str]) -> str:
        kind, names = found[1], found[2]
        tables = [list(KINDS[kind][1](name)) for name in names.split(", ")]
        lines = [*tables[0], *(line for table in tables[1:] for line in table[2:])]
        return "\n".join([f"<!-- {kind}: {names} -->", "", *lines, "", "<!-- end -->"])

    return _BLOCK.sub(block, text)


def named(page: str) -> list[str]:
    """Return the kinds and names of the tables of a page, as in `columns: run`."""
    found = _BLOCK.findall((DOCS / page).read_text("utf-8"))
    return [f"{kind}: {name}" for kind, names in found for name in names.split(", ")]


def names(page: str) -> list[str]:
    """Return the kinds and names of the tables that a page must have."""
    return [f"{kind}: {name}" for kind in PAGES[page] for name in KINDS[kind][0]]


if __name__ == "__main__":
    for page in PAGES:
        path = DOCS / page
        path.write_text(generated(path.read_text("utf-8")), "utf-8")
