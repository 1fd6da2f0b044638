"""Plans a job: finds the work keys without answers, and orders them.

A pure function of index parts and completion parts: equal rows and equal stored keys give an equal plan, however
the rows are split into parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.errors import StorageError
from batchinfer.core.prefix_forest import ROOT, Ints, PrefixForest
from batchinfer.core.wording import counted
from batchinfer.filesystem.duck import connection, parquet, translate_errors
from batchinfer.filesystem.durable import storage
from batchinfer.plan.order.attempts_due import distinct_sql
from batchinfer.plan.order.plan import PLAN_SCHEMA, Plan
from batchinfer.plan.order.prefixes import write_prefixes
from batchinfer.plan.order.requests import Prompts
from batchinfer.plan.order.run_order import depth_first, efforts, kept_together
from batchinfer.plan.order.sharing import NO_SHARING, Sharing, SortedRows, sharing
from batchinfer.plan.order.sorted_prompts import sorted_prompts
from batchinfer.plan.order.work_roots import work_roots
from batchinfer.store.index.reused_rows import NO_REUSED_ROWS, ReusedRows
from batchinfer.store.results.attempts import load_chosen

_ROWS_PER_GROUP = 65_536
_REPEATED = ["params", "expected_tokens", "token_count", "bucket", "prefix_tokens", "users", "final_users"]
_BEFORE_ALL = 40  # bits; every effort is smaller than 2**40
_PARAMS_BYTES = 256 << 20  # of a batch of rows; the schema of one row may have a megabyte


def plan_job(
    index_parts: Sequence[Path],
    prompts: Prompts,
    completion_parts: Sequence[Path],
    out_dir: Path,
    roots: ContentRoots,
    *,
    attempts: int = 1,
    reused: ReusedRows = NO_REUSED_ROWS,
    beside: Sequence[Path] = (),
    in_flight: Sequence[bytes] = (),
    begun: Sequence[bytes] = (),
    more: bool = False,
    shares: bool = True,
    retry_errors: bool = False,
    memory_limit: str | None = None,
    threads: int = 2,
) -> Plan:
    """Plan each distinct key without a stored answer once.

    The plan is a depth-first walk of the prefix tree. At each node, larger efforts come first (`run_order`), so the
    longest rows start early and rows with a common prefix stay together. Of a row's `attempts`, only the first one
    without a valid answer counts.

    The first rows (`reused`) have answers. Prompts in `beside` run but are no rows of the job. Keys that the run
    has handed out before (`begun`), or that engines are computing (`in_flight`), are not planned. Rows that share a
    prefix with those in flight come first, while it is cached.

    If `more` is True, further rows will follow, and `Plan.recurring` estimates what they will share. If `shares` is
    False, no prompt may reuse cached tokens. If `retry_errors` is True, retryable errors count as missing answers.
    DuckDB uses up to `memory_limit` and spills into `out_dir`.

    Raises OutOfMemory, or StorageError if a file is damaged or the index has no tokens of a key, because the key had
    an answer when the index was written.
    """
    with connection(out_dir / "spill", memory_limit, threads) as database:
        if completion_parts and attempts > 1:
            load_chosen(database, completion_parts, attempts)
        new = index_parts[len(reused.parts) :]
        _load_wanted(database, new, attempts if completion_parts else 1, attempts, reused)
        if beside:
            _load_beside(database, beside)
        _load_work(database, completion_parts, retry_errors, in_flight, begun)
        forest, rows = sorted_prompts(database, prompts, work_roots(database, roots))
        shared = _place(database, forest, rows, more, shares)
        path, prefixes = out_dir / "plan.parquet", out_dir / "prefixes.parquet"
        write_plan(database.sql(_ordered_sql()), path, longest_params(database, "work"))
        write_prefixes(prefixes, forest, _offsets(database)[rows[forest.first]])
        return Plan(
            path=path,
            prefixes=prefixes,
            shared_prefix_tokens=shared.saved,
            again_tokens=shared.again,
            recurring=shared.recurring,
            **_counts(database, reused),
        )


def _load_wanted(
    database: Any, index: Sequence[Path], reached: int, attempts: int, reused: ReusedRows
) -> None:
    """Create the table `wanted`: the distinct keys of the rows' current attempts, without keys of reused rows.

    A row may be at attempt `reached` at most. If that is above 1, the table `chosen` must be loaded.
    """
    database.execute(
        "CREATE TEMP TABLE wanted(key BLOB, token_offset BIGINT, token_count INTEGER, params VARCHAR, "
        "expected_tokens INTEGER, users INTEGER, final_users INTEGER, longest INTEGER)"
    )
    database.execute("CREATE TEMP TABLE tally(rows BIGINT, error_rows BIGINT)")
    if index:
        database.execute(f"INSERT INTO wanted {distinct_sql(index, reached, attempts)}")
        database.execute(f"INSERT INTO tally SELECT count(*), count(*) - count(key) FROM {parquet(index)}")
    if reused.rows:
        database.execute(f"DELETE FROM wanted WHERE key IN (SELECT key FROM {parquet(reused.parts)})")


def _load_beside(database: Any, beside: Sequence[Path]) -> None:
    """Add the keys of prompts that serve no row to the table `wanted`."""
    database.execute(
        "INSERT INTO wanted SELECT key, token_offset, token_count, params, expected_tokens, 0, 0, "
        f"token_count + expected_tokens FROM {parquet(beside)} ANTI JOIN wanted USING (key) WHERE key IS NOT NULL"
    )


def _load_work(
    database: Any,
    completions: Sequence[Path],
    retry_errors: bool,
    in_flight: Sequence[bytes],
    begun: Sequence[bytes],
) -> None:
    """Create the table `work`: the rows to run, and the rows that were handed out before.

    Its column `begun` is null for rows to run, 0 for rows with an answer, and the position among `begun` (from 1)
    for rows in flight.
    """
    database.execute("CREATE TEMP TABLE present(key BLOB)")
    if completions:
        usable = "WHERE error_code IS NULL OR retryable IS NOT TRUE" if retry_errors else ""
        stored = f"(SELECT key FROM {parquet(completions)} {usable})"
        database.execute(
            f"INSERT INTO present SELECT DISTINCT key FROM {stored} SEMI JOIN wanted USING (key)"
        )
    _load_keys(database, "flying", in_flight)
    _load_keys(database, "started", begun)
    database.execute("INSERT INTO present SELECT key FROM flying UNION ALL SELECT key FROM started")
    rest = "SELECT *, NULL::INTEGER AS begun FROM wanted ANTI JOIN present USING (key)"
    flies = "CASE WHEN key IN (SELECT key FROM flying) THEN place ELSE 0 END"
    before = f"SELECT wanted.*, {flies} AS begun FROM wanted JOIN started USING (key)"
    database.execute(f"CREATE TEMP TABLE work AS {rest} UNION ALL {before} ORDER BY token_offset, key")
    (lacking,) = database.execute("SELECT count(*) FROM work WHERE token_offset IS NULL").fetchall()[0]
    if lacking:
        raise StorageError(
            f"the stored answers of {counted(lacking, 'request')} are gone, or no longer valid, since the input was "
            "read; run the job again"
        )


def _load_keys(database: Any, name: str, keys: Sequence[bytes]) -> None:
    """Create a table of keys with their positions, starting at 1."""
    places = np.arange(1, len(keys) + 1, dtype=np.int32)
    database.register("given", pa.table({"key": pa.array(keys, pa.binary()), "place": places}))
    database.execute(f"CREATE TEMP TABLE {name} AS SELECT * FROM given")
    database.unregister("given")


def _offsets(database: Any) -> NDArray[np.int64]:
    """Return the offset of each prompt of `work` in the token store."""
    found: NDArray[np.int64] = database.sql("SELECT token_offset FROM work").fetchnumpy()["token_offset"]
    return found


def _place(database: Any, forest: PrefixForest, rows: Ints, more: bool, shares: bool) -> Sharing:
    """Create the table `place` with the position and prefix of each row of `work`. Return what the rows share."""
    numbers = database.sql(
        "SELECT token_count, expected_tokens, token_offset, begun IS NULL AS runs, coalesce(begun, 0) AS begun "
        "FROM work"
    ).fetchnumpy()
    runs = numbers["runs"][rows]
    effort = efforts(numbers["token_count"], numbers["expected_tokens"])[rows]
    effort[~runs] = 0
    # The most recent requests stay longest in the cache, so rows that share their prefixes run first
    effort += numbers["begun"][rows].astype(np.int64) << _BEFORE_ALL
    deepest = forest.node_of
    depths = np.append(forest.depth, np.int32(0))  # ROOT (-1) selects the appended 0
    columns = depth_first(kept_together(forest), effort), deepest, depths[deepest]
    names = ("seq", "prefix_group", "prefix_tokens")
    placed = {name: _by_row(column, rows) for name, column in zip(names, columns, strict=True)}
    database.register("placed", pa.table(placed))
    database.execute("CREATE TEMP TABLE place AS SELECT * FROM placed")
    database.unregister("placed")
    if not shares:
        return NO_SHARING
    return sharing(
        forest, SortedRows(runs, numbers["token_offset"][rows], numbers["token_count"][rows]), more
    )


def _by_row(values: Ints, rows: Ints) -> Ints:
    found = np.empty_like(values)
    found[rows] = values
    return found


def longest_params(database: Any, source: str) -> int:
    """Return the bytes of the longest parameters in a table or another SQL source."""
    found = database.execute(f"SELECT coalesce(max(strlen(params)), 0) FROM {source}").fetchall()
    return int(found[0][0])


def write_plan(query: Any, path: Path, longest: int) -> None:
    """Write the rows of a DuckDB query in order.

    Args:
        query: Returns all columns of PLAN_SCHEMA except `seq`.
        path: File to write.
        longest: Bytes of the longest parameters, from `longest_params`.

    Raises:
        StorageError: The file cannot be written.
    """
    done, rows = 0, min(_ROWS_PER_GROUP, max(1, _PARAMS_BYTES // max(1, longest)))
    with translate_errors(path), storage(path, "write"):
        writer = pq.ParquetWriter(
            path,
            PLAN_SCHEMA,
            compression={name: "none" if name == "key" else "zstd" for name in PLAN_SCHEMA.names},
            use_dictionary=_REPEATED,
            write_page_checksum=True,
        )
        for batch in query.to_arrow_reader(rows):
            seq = pa.array(np.arange(done, done + batch.num_rows))
            columns = [
                seq,
                *(batch.column(i).cast(PLAN_SCHEMA.types[i + 1]) for i in range(batch.num_columns)),
            ]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=PLAN_SCHEMA))
            done += batch.num_rows
        writer.close()  # on success only


def _ordered_sql() -> str:
    return (
        "SELECT key, token_offset, token_count, params, expected_tokens, "
        "ceil(log2(greatest(token_count + expected_tokens, 1)))::INTEGER AS bucket, "
        f"nullif(prefix_group, {ROOT}) AS prefix_group, prefix_tokens, users, final_users "
        "FROM work POSITIONAL JOIN place WHERE begun IS NULL ORDER BY seq"
    )


def _counts(database: Any, reused: ReusedRows) -> dict[str, int]:
    """Return the counts of a plan. The table `wanted` has no keys of reused rows, so their counts are added."""
    names = [
        "rows",
        "error_rows",
        "distinct",
        "duplicates",
        "present",
        "to_run",
        "prompt_tokens",
        "expected_tokens",
        "longest",
        "rows_to_run",
        "without_rows",
    ]
    values = database.execute(
        "WITH t AS (SELECT coalesce(sum(rows), 0) r, coalesce(sum(error_rows), 0) e FROM tally), "
        "w AS (SELECT count(*) FILTER (users > 0) u FROM wanted), "
        "k AS (SELECT count(*) n, count(*) FILTER (users = 0) w, coalesce(sum(token_count::BIGINT), 0) p, "
        "coalesce(sum(expected_tokens::BIGINT), 0) o, coalesce(max(longest), 0) l, coalesce(sum(users), 0) u "
        "FROM work WHERE begun IS NULL) "
        "SELECT t.r, t.e, w.u, t.r - t.e - w.u, w.u - k.n + k.w, k.n, k.p, k.o, k.l, k.u, k.w FROM t, w, k"
    ).fetchall()
    found = {name: int(value) for name, value in zip(names, values[0], strict=True)}
    more = {
        "rows": reused.rows,
        "error_rows": reused.errors,
        "distinct": reused.distinct,
        "present": reused.distinct,
        "duplicates": reused.rows - reused.errors - reused.distinct,
    }
    return {name: value + more.get(name, 0) for name, value in found.items()}
