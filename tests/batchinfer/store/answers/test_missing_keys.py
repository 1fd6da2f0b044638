"""Missing keys are detected from a part of a job's keys, with the same result as the plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.answers.missing_keys import MissingKeys, key_batches
from tests.batchinfer.store.small_index import answer, failure

# Some differ in their first byte, some only after the eighth
KEYS = [bytes([n % 6, *[7] * 7, n // 24, *[n] * 23]) for n in range(24)]
some = st.lists(st.sampled_from(KEYS), max_size=30)


def stored(
    path: Path, answered: Sequence[bytes], refused: Sequence[bytes], failed: Sequence[bytes]
) -> list[Path]:
    """Write two parts of a store: one with answers and errors, one with errors that may be retried."""
    with CompletionStore(path) as store:
        store.append([*map(answer, answered), *(failure(key, retryable=False) for key in refused)])
        store.commit()
        store.append(map(failure, failed))
        store.commit()
        return store.parts()


def starts(keys: Sequence[bytes]) -> set[bytes]:
    return {key[:8] for key in keys}


@given(st.tuples(some, some, some), st.lists(some), st.integers(1, 5), st.booleans())
def test_as_many_distinct_keys_as_are_wanted(
    kept: tuple[list[bytes], list[bytes], list[bytes]], read: list[list[bytes]], most: int, retry: bool
) -> None:
    with TemporaryDirectory() as folder:
        missing = MissingKeys(stored(Path(folder), *kept), most, retry)
    present = starts(kept[0]) | starts(kept[1]) | (set() if retry else starts(kept[2]))
    seen: set[bytes] = set()
    for keys in read:
        missing.add(b"".join(keys))
        seen |= starts(keys) - present
        assert missing.has_enough == (len(seen) >= most)


def test_the_keys_of_an_index_without_its_error_rows(tmp_path: Path) -> None:
    keys = [KEYS[0], None, KEYS[1], None, KEYS[0]]
    for number, part in enumerate((keys, [None], keys[2:])):
        pq.write_table(pa.table({"key": pa.array(part, pa.binary(32))}), tmp_path / f"part-{number}.parquet")
    found = b"".join(key_batches(sorted(tmp_path.iterdir())))
    assert found == b"".join([KEYS[0], KEYS[1], KEYS[0], KEYS[1], KEYS[0]])
