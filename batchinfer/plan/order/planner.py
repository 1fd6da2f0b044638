"""Plans a job: finds the work keys without stored answers, and orders their requests.

The plan depends only on the contents of the index and of the stored answers: equal rows and equal stored keys
give an equal plan, however the rows are split into parts.
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
from batchinfer.plan.order.sharing import NO_SHARING, Sharing, SortedRows, measure_sharing
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
    extra_prompts: Sequence[Path] = (),
    in_flight: Sequence[bytes] = (),
    begun: Sequence[bytes] = (),
    more: bool = False,
    shares: bool = True,
    retry_errors: bool = False,
    memory_limit: str | None = None,
    threads: int = 2,
) -> Plan:
    """Plan the requests of a job: each distinct work key without a stored answer, in order of execution.

    Raises OutOfMemory, or StorageError if a file is damaged or a stored answer was deleted after its row was indexed.

    Args:
        index_parts: Parquet files of the job's index.
        prompts: The token ids of all prompts.
        completion_parts: Parquet files of the stored answers.
        out_dir: Folder for the files of the plan, and for temporary files of DuckDB.
        roots: Tells which requests may share cached prefixes.
        attempts: Maximum number of attempts per row. After an invalid answer, the row's next attempt is planned.
        reused: The first files of `index_parts`, whose rows have answers from an earlier run and are not planned.
        extra_prompts: Parquet files with prompts to run that belong to no row of the job.
        in_flight: Work keys that engines compute now. Not planned. Requests that share their prefixes come first.
        begun: Work keys that engines have received so far, those in flight included. They are not planned.
        more: Whether further rows will be read. If True, `Plan.recurring` is estimated.
        shares: Whether prompts may reuse cached tokens of other prompts.
        retry_errors: Whether stored errors that may be retried count as missing answers.
        memory_limit: Memory limit of DuckDB, such as "2GB". None: DuckDB's default.
        threads: Threads of DuckDB.
    """
    with connection(out_dir / "spill", memory_limit, threads) as database:
        if completion_parts and attempts > 1:
            load_chosen(database, completion_parts, attempts)
        new = index_parts[len(reused.parts) :]
        _load_wanted(database, new, attempts if completion_parts else 1, attempts, reused)
        if extra_prompts:
            _load_extra(database, extra_prompts)
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


def _load_extra(database: Any, extra_prompts: Sequence[Path]) -> None:
    database.execute(
        "INSERT INTO wanted SELECT key, token_offset, token_count, params, expected_tokens, 0, 0, "
        f"token_count + expected_tokens FROM {parquet(extra_prompts)} "
        "ANTI JOIN wanted USING (key) WHERE key IS NOT NULL"
    )


def _load_work(
    database: Any,
    completions: Sequence[Path],
    retry_errors: bool,
    in_flight: Sequence[bytes],
    begun: Sequence[bytes],
) -> None:
    # Column `begun`: null for requests to run; for requests in flight their position in `begun`, from 1; 0 for
    # requests that engines have answered. They stay in the table for the prefixes that requests to run share with
    # them.
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
    places = np.arange(1, len(keys) + 1, dtype=np.int32)
    database.register("given", pa.table({"key": pa.array(keys, pa.binary()), "place": places}))
    database.execute(f"CREATE TEMP TABLE {name} AS SELECT * FROM given")
    database.unregister("given")


def _offsets(database: Any) -> NDArray[np.int64]:
    found: NDArray[np.int64] = database.sql("SELECT token_offset FROM work").fetchnumpy()["token_offset"]
    return found


def _place(database: Any, forest: PrefixForest, rows: Ints, more: bool, shares: bool) -> Sharing:
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
    return measure_sharing(
        forest, SortedRows(runs, numbers["token_offset"][rows], numbers["token_count"][rows]), more
    )


def _by_row(values: Ints, rows: Ints) -> Ints:
    found = np.empty_like(values)
    found[rows] = values
    return found


def longest_params(database: Any, source: str) -> int:
    """Return the size in bytes of the longest JSON of sampling parameters in a table.

    Args:
        database: A DuckDB connection.
        source: Name of a table, or another SQL source, with the column `params`.
    """
    found = database.execute(f"SELECT coalesce(max(strlen(params)), 0) FROM {source}").fetchall()
    return int(found[0][0])


def write_plan(query: Any, path: Path, longest: int) -> None:
    """Write the requests of a plan as a Parquet file with the columns of PLAN_SCHEMA.

    Args:
        query: A DuckDB relation with all columns of PLAN_SCHEMA except `seq`, in order of execution.
        path: File to write.
        longest: Result of `longest_params` for the query. It limits the number of rows per row group, and thus the
            memory.

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
