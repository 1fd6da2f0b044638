"""The reply of a render worker, as JSON and raw numbers. Never a pickle: the worker runs untrusted templates.

All contents are checked before use: sizes, counts, bounds, and UTF-8.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.core.errors import Unavailable
from batchinfer.core.reasoning import CLOSED, NO_MARKER, OPEN
from batchinfer.core.request import RowError
from batchinfer.core.sampling import MAX_SAMPLES
from batchinfer.input.json_kinds import KINDS
from batchinfer.input.openai import MAX_INPUTS
from batchinfer.input.prompts.arguments.unread import UnreadArguments
from batchinfer.input.prompts.keys import KEY_BYTES
from batchinfer.input.prompts.prepared.rows import (
    NO_PROMPTS,
    FurtherPrompts,
    OwnTexts,
    PreparedPrompts,
    PreparedRows,
    PreparedRungs,
)
from batchinfer.input.prompts.row_facts import MOST_NAMES, RowFacts, RowFields
from batchinfer.input.tool_calls.known_tools import KnownTools

_SIZE = 8  # bytes of the length before each part
_FAILED = "failed"


class BadReply(Exception):
    """Raised for a malformed reply of a render worker, for example if a template has corrupted the process."""


def serialize_reply(done: PreparedRows) -> bytes:
    """Serialise the prepared rows of a chunk, as the reply of a render worker to its parent process."""
    prompts, facts = done.prompts, done.facts
    head = {
        "rows": len(done),
        "errors": {str(at): asdict(error) for at, error in prompts.errors.items()},
        "params": prompts.params,
        "unread_arguments": prompts.unread,
        "tools": prompts.own_texts.texts,
        "kinds": [sorted(kinds) for kinds in facts.kinds],
        "unread": facts.unread,
        "names": facts.names,
        "found": sorted(facts.found),
    }
    parts = [json.dumps(head).encode()]
    parts += [column.tobytes() for column in (prompts.params_of, prompts.max_tokens, prompts.counts)]
    parts += [
        prompts.keys,
        prompts.tokens.tobytes(),
        prompts.openings.tobytes(),
        prompts.own_texts.of.tobytes(),
    ]
    for rung in prompts.rungs:
        parts += [(rung.params_of + 1).tobytes(), rung.max_tokens.tobytes(), rung.keys]
    for column in _text_columns(facts):
        parts += _encode_texts(column)
    more = prompts.further
    numbers = (prompts.samples, prompts.dimensions, more.rows, more.counts, more.tokens)
    parts += [b"" if one is None else one.tobytes() for one in numbers]
    parts.append(more.keys)
    return b"".join(piece for part in parts for piece in (len(part).to_bytes(_SIZE, "little"), part))


def serialize_failure(message: str) -> bytes:
    """Serialise the reply of a render worker that cannot prepare rows. `message` is the reason."""
    text = json.dumps({_FAILED: message}).encode()
    return len(text).to_bytes(_SIZE, "little") + text


def _text_columns(facts: RowFacts) -> Iterator[pa.StringArray]:
    yield facts.ids
    if facts.endpoints is not None:
        yield facts.endpoints
    yield from facts.carried


def _encode_texts(column: pa.StringArray) -> list[bytes]:
    valid = np.asarray(column.is_valid()).astype(np.uint8)
    if not len(column):
        return [b"", b"", b""]
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    texts = b"" if data is None else data[int(ends[0]) : int(ends[-1])].to_pybytes()
    return [valid.tobytes(), (ends - ends[0]).astype(np.int32).tobytes(), texts]


def parse_reply(
    data: bytes, fields: RowFields, vocab_size: int, rungs: int = 0, *, reused: bool = False
) -> PreparedRows:
    """Check the reply of a render worker, and return the prepared rows that it contains.

    Args:
        data: The reply.
        fields: The values that were taken from each row.
        vocab_size: The number of token ids of the model. Larger ids are errors.
        rungs: The number of further attempts in the job's ladder.
        reused: True if the rows were stored by an earlier run; they then have no tokens.

    Raises:
        BadReply: The reply is malformed.
        Unavailable: The reply is a failure: the worker could not prepare any row.
    """
    parts = _ReplyParts(data)
    try:
        head = json.loads(parts.next())
        if _FAILED in head:
            raise Unavailable(str(head[_FAILED]))
        return _rows(head, parts, fields, vocab_size, rungs, reused)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, pa.ArrowException) as error:
        raise BadReply(str(error)) from error


class _ReplyParts:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def next(self) -> bytes:
        start = self._at + _SIZE
        end = start + int.from_bytes(self._data[self._at : start], "little")
        if end > len(self._data):
            raise ValueError("a part lies outside of the reply")
        self._at = end
        return self._data[start:end]

    def numbers(self, count: int | None = None, below: int = 1 << 31) -> NDArray[np.int32]:
        """Read the next part of a reply as int32 numbers. Raises ValueError if it is invalid.

        Args:
            count: The number of numbers that the part must have, or None for any.
            below: The numbers must not be negative, and must be less than this.
        """
        found = np.frombuffer(self.next(), np.int32)
        if count is not None and len(found) != count:
            raise ValueError(f"{len(found)} numbers for {count} rows")
        if len(found) and not 0 <= int(found.min()) <= int(found.max()) < below:
            raise ValueError("a number is out of its range")
        return found

    def openings(self, count: int) -> NDArray[np.int8]:
        """Read the next part of a reply: how each of `count` prompts ends (NO_MARKER, OPEN or CLOSED)."""
        found = np.frombuffer(self.next(), np.int8)
        if len(found) != count or not np.isin(found, (NO_MARKER, OPEN, CLOSED)).all():
            raise ValueError("the ends of prompts do not match the rows")
        return found

    def of_rows(self, count: int, below: int = 1 << 31) -> NDArray[np.int32] | None:
        """Read the next part of a reply as one int32 number per row. Return None if the part is empty.

        Args:
            count: The number of rows.
            below: The numbers must not be negative, and must be less than this.
        """
        found = self.numbers(below=below)
        if len(found) not in (0, count):
            raise ValueError("numbers do not match the rows")
        return found if len(found) else None

    def further(self, prompts: PreparedPrompts, vocab_size: int) -> FurtherPrompts:
        """Read the next parts of a reply: the further prompts of embedding requests with several inputs.

        Raises ValueError if they are invalid.

        Args:
            prompts: The first prompts of all rows.
            vocab_size: The number of token ids of the model.
        """
        rows, counts, tokens = (
            self.numbers(below=max(1, len(prompts))),
            self.numbers(),
            self.numbers(below=vocab_size),
        )
        found = FurtherPrompts(rows, counts, self.next(), tokens)
        if (
            len(counts) != len(rows)
            or len(found.keys) != KEY_BYTES * len(rows)
            or len(tokens) != counts.sum()
        ):
            raise ValueError("further prompts are incomplete")
        if not len(rows):
            return NO_PROMPTS
        whose, times = np.unique(rows, return_counts=True)
        answers = prompts.answers(1)[whose]
        sound = (np.diff(rows) >= 0).all() and (counts > 0).all() and prompts.counts[whose].all()
        if not sound or (times + 1 != answers).any():
            raise ValueError("further prompts do not match their rows")
        return found

    def texts(self, count: int) -> pa.StringArray:
        """Read the next parts of a reply as a text column with `count` rows."""
        valid, ends, texts = self.next(), self.next(), self.next()
        if not count:
            return pa.array([], pa.string())
        if len(valid) != count or len(ends) != 4 * (count + 1):
            raise ValueError(f"a column of texts does not have {count} rows")
        mask = np.frombuffer(valid, np.uint8)
        marks = None if mask.all() else pa.py_buffer(np.packbits(mask != 0, bitorder="little"))
        column = pa.StringArray.from_buffers(count, pa.py_buffer(ends), pa.py_buffer(texts), marks)
        column.validate(full=True)
        return column


def _rows(
    head: dict[str, Any], parts: _ReplyParts, fields: RowFields, vocab_size: int, rungs: int, reused: bool
) -> PreparedRows:
    size = _whole(head["rows"])
    errors = {_row(int(at), size): _error(error) for at, error in head["errors"].items()}
    params = _texts(head["params"])
    params_of = parts.numbers(size, below=max(1, len(params)))
    max_tokens, counts = parts.numbers(size), parts.numbers(size)
    keys, tokens, openings = parts.next(), parts.numbers(below=vocab_size), parts.openings(size)
    tools = _tools(head["tools"], parts, size)
    if len(keys) != KEY_BYTES * size:
        raise ValueError("keys do not match the rows")
    if np.flatnonzero(counts == 0).tolist() != sorted(errors):
        raise ValueError("a row has both tokens and an error, or neither")
    ignored = _counts(head["unread_arguments"])
    ladder = [_rung(parts, counts, len(params)) for _ in range(rungs)]
    work = errors, params, params_of, max_tokens, counts, keys, tokens, openings
    prompts, facts = PreparedPrompts(*work, ignored, ladder, tools), _facts(head, parts, fields, size)
    prompts.reused, prompts.samples = reused, parts.of_rows(size, max(MAX_SAMPLES, MAX_INPUTS) + 1)
    prompts.dimensions, prompts.further = parts.of_rows(size), parts.further(prompts, vocab_size)
    if len(tokens) != int(prompts.tokens_there().sum()):
        raise ValueError("tokens do not match the rows")
    return PreparedRows(prompts, facts)


def _rung(parts: _ReplyParts, counts: NDArray[np.int32], params: int) -> PreparedRungs:
    size = len(counts)
    numbers, max_tokens, keys = parts.numbers(size, below=params + 1), parts.numbers(size), parts.next()
    if len(keys) != KEY_BYTES * size or numbers[counts == 0].any():
        raise ValueError("the keys of a rung do not match the rows")
    return PreparedRungs(numbers - 1, max_tokens, keys)


def _facts(head: dict[str, Any], parts: _ReplyParts, fields: RowFields, size: int) -> RowFacts:
    kinds = [set(_texts(names)) for names in head["kinds"]]
    if len(kinds) != len(fields.carried) or not all(names <= KINDS for names in kinds):
        raise ValueError("a carried column has unknown kinds of values")
    ids = parts.texts(size)
    endpoints = parts.texts(size) if fields.endpoints else None
    carried = [parts.texts(size) for _ in fields.carried]
    unread = [_row(_whole(at), size) for at in head["unread"]]
    return RowFacts(
        ids, endpoints, carried, kinds, unread, _texts(head["names"])[:MOST_NAMES], set(_texts(head["found"]))
    )


def _whole(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError("not a number of rows")
    return value


def _row(at: int, size: int) -> int:
    if not 0 <= at < size:
        raise ValueError(f"row {at} of {size}")
    return at


def _texts(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise ValueError("not a list of texts")
    return values


def _tools(values: Any, parts: _ReplyParts, size: int) -> OwnTexts:
    texts = _texts(values)
    for text in texts:
        if not text.startswith("["):  # a list of labels
            KnownTools.check(text)
        else:
            _texts(json.loads(text))
    return OwnTexts(texts, parts.numbers(size if texts else 0, below=len(texts) + 1))


def _counts(values: Any) -> dict[str, int]:
    if not isinstance(values, dict):
        raise ValueError("not an object of numbers")
    names = UnreadArguments()
    names.join({name: _whole(rows) for name, rows in values.items()})
    return names.rows


def _error(values: Any) -> RowError:
    error = RowError(**values)
    texts = (error.code, error.error_class, error.message)
    if not all(isinstance(text, str) for text in texts) or not isinstance(error.retryable, bool):
        raise ValueError("not an error")
    return error
