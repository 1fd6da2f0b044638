"""Rows that the last index of the job knew: all that was made of them but their tokens, which nobody needs again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.core.request import RowError
from batchinfer.data.input.digests.row_digest import DIGEST_BYTES
from batchinfer.data.input.digests.runs import Runs, RunsOfRows
from batchinfer.data.input.rows import Values
from batchinfer.data.kept.rows import SAMPLE_KEYS, KeptRows, Numbers, Records, attempt_names
from batchinfer.data.prompts.prepared.rows import KEY_TYPE, OwnTexts, Prepared, PreparedRungs
from batchinfer.data.prompts.row_facts import RowFacts

Number = TypeVar("Number", bound=np.generic)


class KnownRows:
    """The rows of one chunk: which of them are known, and the digests of all."""

    def __init__(self, kept: KeptRows, runs: Runs, *, skips: bool) -> None:
        """skips: known rows are not read, but for the first one, which shows what columns there are."""
        self._kept = kept
        firsts, sizes = kept.find_runs(runs.digests)
        looked_at = (firsts < 0) | (not skips)
        looked_at[:1] = True
        which = np.flatnonzero(looked_at)
        opened = runs.opened(which)
        sizes[which] = opened.sizes
        self._runs = RunsOfRows(runs.digests, sizes.astype(np.int32))
        # of each row that was looked at, its number in the chunk
        own = np.flatnonzero(np.repeat(looked_at, sizes))
        starts = np.cumsum(sizes) - sizes
        self._places = np.repeat(np.where(firsts < 0, 0, firsts - starts), sizes) + np.arange(
            int(sizes.sum())
        )
        self._places[np.repeat(firsts < 0, sizes)] = -1
        self._digests = np.zeros((len(self._places), DIGEST_BYTES), np.uint8)
        self._digests[own] = np.frombuffer(opened.digests, np.uint8).reshape(-1, DIGEST_BYTES)
        new = self._places[own] < 0
        self._places[own[new]] = kept.find(self._digests[own[new]].tobytes())
        self._looked_at = np.repeat(looked_at, sizes)
        known = self._places >= 0
        self.marks: list[bool] = known.tolist()
        self._skipped = known & skips
        self._skipped[:1] = False
        self.read: list[int] = np.flatnonzero(~self._skipped).tolist()
        self._rows, self._at = opened.rows, np.cumsum(self._looked_at) - 1

    def row(self, index: int) -> Values | RowError:
        """Read one of the rows to `read`."""
        return self._rows[int(self._at[index])]

    def facts(self, read: RowFacts) -> RowFacts:
        """Return the facts of all rows. read: of those that were."""
        if len(self.read) == len(self.marks):
            return read
        skipped = np.flatnonzero(self._skipped)
        ids = pa.concat_arrays([read.ids, self._kept.ids(self._places[skipped])])
        order = np.argsort(np.concatenate([np.array(self.read, np.int64), skipped]))
        return replace(read, ids=ids.take(pa.array(order)), unread=[self.read[at] for at in read.unread])

    def fill(self, prompts: Prepared, nameless: Iterable[int]) -> None:
        """Put what is known into the prompts of the chunk, whose other rows were prepared. `nameless`: rows that are
        not to be known next time."""
        size, digests = len(prompts), self._digests
        found = np.flatnonzero(self._places >= 0)
        records = self._kept.records(self._places[found])
        words = digests.view("<u8")
        words[found, 0], words[found, 1] = records["word"], records["rest"]
        digests[[*nameless, *prompts.errors]] = 0
        prompts.digests, prompts.runs = digests.tobytes(), self._runs
        if not len(found):
            return
        known = np.zeros(size, np.bool_)
        known[found] = True
        prompts.known = known
        prompts.kept_rows = self._places.astype(np.int32)
        prompts.counts = _with(prompts.counts, found, records["count"])
        prompts.openings = _with(prompts.openings, found, records["opening"])
        numbers = {text: number for number, text in enumerate(prompts.params)}
        prompts.own_texts = self._tools(prompts, found, records)
        key, _, _, most = attempt_names(1)
        prompts.params_of = _with(prompts.params_of, found, self._params(records, 1, numbers))
        prompts.max_tokens = _with(prompts.max_tokens, found, records[most])
        prompts.keys = _with_keys(prompts.keys, found, records[key])
        if prompts.sample_keys:
            further = records[SAMPLE_KEYS]
            own = np.frombuffer(prompts.sample_keys, further.dtype)
            prompts.sample_keys = _with(own, found, further).tobytes()
        for attempt, rung in enumerate(prompts.rungs, 2):
            self._fill_rung(rung, attempt, found, records, numbers)
        prompts.params = [*numbers]

    def _fill_rung(
        self, rung: PreparedRungs, attempt: int, found: Numbers, records: Records, numbers: dict[str, int]
    ) -> None:
        key, _, _, most = attempt_names(attempt)
        rung.params_of = _with(rung.params_of, found, self._params(records, attempt, numbers))
        rung.max_tokens = _with(rung.max_tokens, found, records[most])
        rung.keys = _with_keys(rung.keys, found, records[key])

    def _tools(self, prompts: Prepared, found: Numbers, records: Records) -> OwnTexts:
        """Return the texts of all rows."""
        own = prompts.own_texts
        if not own.texts and not records["tools_size"].any():
            return own
        numbers = {text: number for number, text in enumerate(own.texts)}
        known = self._numbers(records["tools_at"], records["tools_size"], numbers)
        of = _with(own.of if own.texts else np.zeros(len(prompts), np.int32), found, known + 1)
        return OwnTexts([*numbers], of)

    def _numbers(
        self, at: NDArray[np.int64], size: NDArray[np.int32], numbers: dict[str, int]
    ) -> NDArray[np.int32]:
        """Return the number of each row's text among all of the chunk's, -1 where a row has none. Rows without one have
        a place of their own."""
        places, which = np.unique(at, return_index=True, return_inverse=True)[1:]
        texts = zip(at[places].tolist(), size[places].tolist(), strict=True)
        own = [numbers.setdefault(self._kept.text(*one), len(numbers)) if one[1] > 0 else -1 for one in texts]
        return np.array(own, np.int32)[which]

    def _params(self, records: Records, attempt: int, numbers: dict[str, int]) -> NDArray[np.int32]:
        _, at, size, _ = attempt_names(attempt)
        return self._numbers(records[at], records[size], numbers)


def _with(column: NDArray[Number], places: Numbers, values: NDArray[Any]) -> NDArray[Number]:
    filled = column.copy()
    filled[places] = values
    return filled


def _with_keys(keys: bytes, places: Numbers, values: NDArray[np.void]) -> bytes:
    return _with(np.frombuffer(keys, KEY_TYPE), places, values).tobytes()
