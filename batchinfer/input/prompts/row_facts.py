"""Facts of rows that the index stores in addition to prompts: ids, endpoints, and columns copied to the results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from batchinfer.core.request import RowError
from batchinfer.input.json_kinds import json_kind, json_text
from batchinfer.input.rows import Values

MOST_NAMES = 200  # maximum number of column names kept for messages
_NO_TEXTS = pa.array([], pa.string())


@dataclass(frozen=True, slots=True)
class RowFields:
    """The columns that are read from each row of the input, by purpose.

    Args:
        prompt: The columns for the prompt, or None for all.
        id: The column of the row's id, or None.
        carried: The columns that are copied to the results.
        as_json: True if copied values become JSON text, since the input has no types.
        endpoints: True if rows are OpenAI requests, whose urls are kept.
        watched: The column names to look for in an input without a schema; None if it has a schema.
    """

    prompt: tuple[str, ...] | None
    id: str | None = None
    carried: tuple[str, ...] = ()
    as_json: bool = False
    endpoints: bool = False
    watched: frozenset[str] | None = None

    @property
    def values(self) -> frozenset[str] | None:
        """The names of all columns whose values are read, or None for all columns."""
        return (
            None
            if self.prompt is None
            else frozenset({*self.prompt, *self.carried, *filter(None, [self.id])})
        )

    def needed(self, row: Values) -> Values:
        """Return the columns of a row that its prompt needs. Columns that the row lacks are left out."""
        return row if self.prompt is None else {name: row[name] for name in self.prompt if name in row}

    def custom_id(self, row: Values) -> str | None:
        """Return the row's id as text, or None if it has none."""
        value = row.get(self.id) if self.id is not None else None
        if value is None or isinstance(value, str):
            return value
        return str(value) if type(value) is int else json.dumps(value, ensure_ascii=False, default=str)


@dataclass(slots=True)
class RowFacts:
    """Facts about n rows that are not part of their prompts: ids, urls and columns for the results.

    Args:
        ids: The ids of the rows.
        endpoints: The urls of OpenAI requests, or None.
        carried: The columns that are copied to the results, as text.
        kinds: Per column in `carried`, the kinds of its values (see `json_kind`).
        unread: The numbers of the rows that could not be read, from 0.
        names: The first column names that occurred, for messages.
        found: The names in `RowFields.watched` that occurred.
    """

    ids: pa.StringArray
    endpoints: pa.StringArray | None = None
    carried: list[pa.StringArray] = field(default_factory=list)
    kinds: list[set[str]] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    found: set[str] = field(default_factory=set)

    @property
    def read_rows(self) -> int:
        """The number of rows that could be read."""
        return len(self.ids) - len(self.unread)

    def first(self, rows: int) -> RowFacts:
        """Return the ids, urls and copied columns of the first `rows` rows. All other facts are empty."""
        ends = None if self.endpoints is None else self.endpoints.slice(0, rows)
        carried = [column.slice(0, rows) for column in self.carried]
        return RowFacts(self.ids.slice(0, rows), ends, carried)


class FactsCollector:
    """Collects one RowFacts about consecutive rows: their ids, carried columns, unread rows and column names."""

    def __init__(self, fields: RowFields) -> None:
        self._fields = fields
        self._ids: list[str | None] = []
        self._endpoints: list[str | None] = []
        self._carried: list[list[str | None]] = [[] for _ in fields.carried]
        self._kinds: list[set[str]] = [set() for _ in fields.carried]
        self._unread: list[int] = []
        self._names: dict[str, None] = {}
        self._shapes: set[tuple[str, ...]] = set()
        self._found: set[str] = set()

    def note(self, row: Values | RowError) -> None:
        """Record the facts about the next row. If it could not be read, record this, and nulls as its values."""
        if isinstance(row, RowError):
            self._unread.append(len(self._ids))
            row = {}
        elif self._fields.watched is not None:
            self._note_names(row, self._fields.watched)
        self._ids.append(self._fields.custom_id(row))
        if self._fields.endpoints:
            url = row.get("url")
            self._endpoints.append(url if isinstance(url, str) else None)
        for at, name in enumerate(self._fields.carried):
            self._carried[at].append(self._text(at, row[name]) if name in row else None)

    def _text(self, at: int, value: Any) -> str | None:
        if not self._fields.as_json:
            return None if value is None else str(value)
        self._kinds[at].add(json_kind(value))
        return None if value is None else json_text(value)

    def _note_names(self, row: Values, watched: frozenset[str]) -> None:
        shape = tuple(row)
        if shape in self._shapes:
            return
        if len(self._shapes) < MOST_NAMES:
            self._shapes.add(shape)
        self._found |= watched.intersection(row)
        for name in shape if len(self._names) < MOST_NAMES else ():
            if len(self._names) < MOST_NAMES:
                self._names.setdefault(name)

    def finish(self) -> RowFacts:
        """Return the facts about all rows that were recorded."""
        return RowFacts(
            pa.array(self._ids, pa.string()),
            pa.array(self._endpoints, pa.string()) if self._fields.endpoints else None,
            [pa.array(texts, pa.string()) for texts in self._carried],
            self._kinds,
            self._unread,
            list(self._names),
            self._found,
        )


def no_facts(fields: RowFields, rows: int) -> RowFacts:
    """Return the facts about `rows` rows that could not be read: all ids and values are null."""
    collected = FactsCollector(fields)
    for _ in range(rows):
        collected.note(RowError("", "input", ""))
    return collected.finish()


def join_facts(parts: Sequence[RowFacts]) -> RowFacts:
    """Join the facts about consecutive groups of rows, in order."""
    first, unread, start = parts[0], [], 0
    names: dict[str, None] = {}
    for part in parts:
        unread += [start + at for at in part.unread]
        start += len(part.ids)
        names |= dict.fromkeys(part.names)
    columns = range(len(first.carried))
    return RowFacts(
        _join(part.ids for part in parts),
        None if first.endpoints is None else _join(part.endpoints for part in parts),
        [_join(part.carried[at] for part in parts) for at in columns],
        [set().union(*(part.kinds[at] for part in parts)) for at in columns],
        unread,
        list(names)[:MOST_NAMES],
        set().union(*(part.found for part in parts)),
    )


def _join(columns: Iterable[pa.StringArray]) -> pa.StringArray:
    return pa.concat_arrays([_NO_TEXTS, *columns])
