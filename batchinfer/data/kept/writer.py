"""Writes the files of a stretch of a kept index as its rows come."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.data.input.digests.row_digest import DIGEST_BYTES
from batchinfer.data.input.digests.runs import RunsOfRows
from batchinfer.data.kept.facts import StretchFacts
from batchinfer.data.kept.files import NAMES, new_folder
from batchinfer.data.kept.rows import Numbers, Records, sorted_runs, sorted_words
from batchinfer.data.storage.durable import Digest, DurableFile, FileOps

_AT_ONCE = 1 << 17  # numbers, of a megabyte
# Texts of parameters and tools, and bytes of them; one that comes again after so many others is written again
_REMEMBERED, _REMEMBERED_BYTES = 4096, 64 << 20


class KeptWriter:
    """`finish` at the end, or nothing is kept; `close` in any case."""

    def __init__(self, kept: Path, ops: FileOps) -> None:
        self._folder = new_folder(kept, ops)
        self._files = {name: DurableFile(self._folder / name, ops) for name in NAMES}
        self._words: list[NDArray[np.uint64]] = []
        self._rows = 0
        self._runs: list[tuple[bytes, Numbers, Numbers]] = []  # digests, first rows, numbers of rows
        self._texts: dict[str, tuple[int, int]] = {}
        self._text_bytes = 0
        self._files["id_ends.bin"].write(bytes(8))

    def texts(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Write texts of parameters or tools that are not written yet. Return where each is, and how long: (n, 2)."""
        places = [self._texts.get(text) or self._written(text) for text in texts]
        return np.array(places, np.int64).reshape(-1, 2)

    def _written(self, text: str) -> tuple[int, int]:
        data, file = text.encode(), self._files["params.bin"]
        if len(self._texts) >= _REMEMBERED or self._text_bytes + len(data) > _REMEMBERED_BYTES:
            self._texts, self._text_bytes = {}, 0
        place = self._texts[text] = (file.tell(), len(data))
        self._text_bytes += len(data)
        file.write(data)
        return place

    def append(self, digest: str, records: Records, ids: pa.StringArray, reply: bytes) -> None:
        """Write one chunk: its digest, or none where it must not be used again as a whole."""
        if len(ids):
            _, offsets, data = ids.buffers()
            ends = np.frombuffer(offsets, np.int32)[ids.offset : ids.offset + len(ids) + 1].astype(np.int64)
            texts = b"" if data is None else data[int(ends[0]) : int(ends[-1])].to_pybytes()
            self._files["id_ends.bin"].write((ends[1:] - ends[0] + self._files["ids.bin"].tell()).tobytes())
            self._files["ids.bin"].write(texts)
        self._words.append(records["word"].copy())
        self._files["rows.bin"].write(records.tobytes())
        replies = self._files["replies.bin"]
        line = [digest, len(records), replies.tell(), len(reply)]
        replies.write(reply)
        self._files["chunks.jsonl"].write(json.dumps(line).encode() + b"\n")

    def append_runs(self, runs: RunsOfRows, records: Records) -> None:
        """Note the runs that the rows appended last are: those of which each row can be found."""
        first, self._rows = self._rows, self._rows + len(records)
        sizes = runs.sizes[runs.sizes > 0].astype(np.int64)
        if not len(sizes):
            return
        digests = np.frombuffer(runs.digests, np.uint8).reshape(-1, DIGEST_BYTES)[runs.sizes > 0]
        starts = np.cumsum(sizes) - sizes
        found = np.logical_and.reduceat(
            (records["word"] != 0) | (records["rest"] != 0), starts
        ) & digests.any(axis=1)
        self._runs.append((digests[found].tobytes(), first + starts[found], sizes[found]))

    @property
    def folder(self) -> str:
        """Return the name of the stretch's folder."""
        return self._folder.name

    def finish(self, facts: StretchFacts) -> dict[str, Digest]:
        """Complete the files, and return their digests: they count once a marker names the stretch. Raises
        StorageError."""
        words, order = sorted_words(self._words)
        for name, numbers in (("words.bin", words), ("order.bin", order)):
            for start in range(0, len(numbers), _AT_ONCE):
                self._files[name].write(numbers[start : start + _AT_ONCE].tobytes())
        self._words = []
        none = np.zeros(0, np.int64)
        digests, firsts, rows = zip((b"", none, none), *self._runs, strict=True)
        run_words, runs = sorted_runs(digests, np.concatenate(firsts), np.concatenate(rows))
        self._files["run_words.bin"].write(run_words.tobytes())
        self._files["runs.bin"].write(runs.tobytes())
        self._runs = []
        self._files["facts.json"].write(facts.to_json())
        return {name: file.commit() for name, file in self._files.items()}

    def close(self) -> None:
        """Give up what was not finished."""
        for file in self._files.values():
            file.close()
