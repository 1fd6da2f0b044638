"""Splits the texts of stored answers into answer, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.core.reasoning import NO_MARKER, Reasoning
from batchinfer.core.tool_calls import CallStyle
from batchinfer.store.columns.logprob_column import Detokenizer
from batchinfer.store.index.index import OPENING, TOOLS
from batchinfer.store.outputs.call_column import CallingAnswer, call_column, split_calls
from batchinfer.store.outputs.frame import Frame
from batchinfer.store.outputs.reasoning_columns import SplitAnswer, StoredAnswer, split_reasoning

_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class AnswerTexts:
    """The texts of answers, as result columns with a value per row.

    Attributes:
        generated: The text after the reasoning and without tool calls.
        reasoning: Two columns: the reasoning and its number of tokens. Empty if the result has no such
            columns.
        calls: The tool calls. None: the result has no such column.
    """

    generated: pa.Array
    reasoning: tuple[pa.Array, ...] = ()
    calls: pa.Array | None = None


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Converts stored answers to texts, and separates reasoning and tool calls.

    Attributes:
        reasoning: How the model marks reasoning. None: it does not reason.
        style: How the model writes tool calls. None: the result has no column of calls.
        detokenizer: Converts tokens to text.
    """

    reasoning: Reasoning | None
    style: CallStyle | None
    detokenizer: Detokenizer

    def texts(self, rows: pa.Table, matched: pa.Table, frame: Frame, told: NDArray[np.bool_]) -> AnswerTexts:
        """Return the texts of answers as result columns. They are null for rows without a text.

        Args:
            rows: Rows of the index.
            matched: The completion of each row.
            frame: These rows and completions combined.
            told: A boolean per row: True if the row has a text.
        """
        if self.reasoning is None and self.style is None:
            return AnswerTexts(_texts(matched, told, self.detokenizer))
        places = pa.array(np.flatnonzero(told))
        answers = self._answers(rows, matched, places)
        back = np.full(len(told), -1, np.int64)
        back[told] = np.arange(len(answers))
        where = pa.array(back, mask=back < 0)
        calls = None
        if self.style is None:
            split = self._split(answers)
        else:
            answered = frame.answered.to_numpy()[told]
            tools = [rows.column(name).take(places).to_pylist() for name in ("key", TOOLS.name)]
            calling = [CallingAnswer(*one) for one in zip(answers, *tools, answered.tolist(), strict=True)]
            split, found = split_calls(calling, self.style, self._split, self.detokenizer)
            calls = call_column(calling, found, self.style).take(where)
        return self._columns(split, where, frame, calls)

    def _answers(self, rows: pa.Table, matched: pa.Table, places: pa.Array) -> list[StoredAnswer]:
        names = ("token_ids", "text_length", "finish_reason")
        given = [matched.column(name).take(places).to_pylist() for name in names]
        none = self.reasoning is None
        openings = [NO_MARKER] * len(places) if none else rows.column(OPENING.name).take(places).to_pylist()
        return [
            # If a stop string ended the answer (limit is set), the last token is part of the text
            StoredAnswer(ids or [], limit, opening, reason == "stop" and limit is None)
            for ids, limit, reason, opening in zip(*given, openings, strict=True)
        ]

    def _split(
        self, answers: Sequence[StoredAnswer], detokenizer: Detokenizer | None = None
    ) -> list[SplitAnswer]:
        detokenizer = detokenizer or self.detokenizer
        if self.reasoning is not None:
            return split_reasoning(answers, self.reasoning, detokenizer)
        texts = detokenizer.decode_batch([one.ids for one in answers])
        return [SplitAnswer(text[: one.limit], None, 0) for text, one in zip(texts, answers, strict=True)]

    def _columns(
        self, split: Sequence[SplitAnswer], where: pa.Array, frame: Frame, calls: pa.Array | None
    ) -> AnswerTexts:
        texts, inside, counts = (
            pa.array([getattr(one, name) for one in split], kind).take(where)
            for name, kind in (("text", pa.string()), ("reasoning", pa.string()), ("tokens", pa.int32()))
        )
        if self.reasoning is None:
            return AnswerTexts(texts, (), calls)
        return AnswerTexts(texts, (inside, frame.when_answered(pa.chunked_array([counts]))), calls)


def _texts(matched: pa.Table, answered: NDArray[np.bool_], detokenizer: Detokenizer) -> pa.Array:
    # Equal answers are decoded once
    places = np.flatnonzero(answered)
    chosen = matched.select(["token_ids", "text_length"]).take(pa.array(places)).combine_chunks()
    texts: list[str] = []
    which = np.full(len(answered), -1, np.int64)
    if len(places):
        lists, which[places] = _distinct(chosen.column("token_ids").chunk(0))
        texts = list(detokenizer.decode_batch(lists))
        limits = chosen.column("text_length").chunk(0)
        for number in np.flatnonzero(limits.is_valid().to_numpy(zero_copy_only=False)).tolist():
            place = places[number]
            texts.append(texts[which[place]][: limits[number].as_py()])
            which[place] = len(texts) - 1
    return pa.array(texts, pa.string()).take(pa.array(which, mask=which < 0))


def _distinct(column: pa.ListArray) -> tuple[list[Sequence[int]], NDArray[np.int32]]:
    ids = column.values
    ends = (column.offsets.to_numpy().astype(np.int64) + ids.offset) * _ID_BYTES
    as_bytes = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(column), [None, pa.py_buffer(ends), ids.buffers()[1]]
    )
    found = as_bytes.dictionary_encode()
    _, ends, data = found.dictionary.buffers()
    bounds = (np.frombuffer(ends, np.int64, len(found.dictionary) + 1) // _ID_BYTES).tolist()
    tokens = [] if data is None else np.frombuffer(data, np.int32, bounds[-1]).tolist()
    lists = [tokens[start:end] for start, end in pairwise(bounds)]
    return lists, found.indices.to_numpy()
