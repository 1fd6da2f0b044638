"""The planner: which keys are missing, and in which order to run them.

Pure: index parts and completion parts in, an ordered Plan out. Equal index rows and equal keys present give
an equal plan, however the rows are split into parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.data.prompts.keys import PREFIX_COLUMNS, PREFIX_LENGTHS
from batchinfer.data.storage.duck import connection, naming_errors, parquet
from batchinfer.data.storage.durable import storage
from batchinfer.plan.plan import PLAN_SCHEMA, Plan

# What ends last must start first, and an output token takes a step where a prompt token takes a share of one. Sorted by
# outputs alone, though, rows of one cohort read together and answer together, which leaves the device to one of
# the two. Simulated over the scheduler with the operators' declared costs (15 settings each: 128 and 700 rows of
# log-uniform prompts 16…1024 and outputs 8…256; 600 and 1000 rows with one output 20 × the median), seconds against
# the best order of each setting, mean (worst):
#                 shuffled       prompt + output  output         prompt + 2 o.  prompt + 4 o.  prompt + 8 o.
#   135M, CPU     1.007 (1.014)  1.004 (1.013)    1.005 (1.014)  1.003 (1.010)  1.002 (1.006)  1.002 (1.009)
#   8B, one GPU   1.088 (1.177)  1.036 (1.132)    1.017 (1.066)  1.023 (1.096)  1.006 (1.023)  1.005 (1.012)
# A CPU is bound by compute whatever it mixes, so no order gains much there.
OUTPUT_WEIGHT = 4
_ROWS_PER_GROUP = 65_536


def plan_job(
    index_dir: Path,
    completion_parts: Sequence[Path],
    out_dir: Path,
    *,
    retry_errors: bool = False,
    memory_limit: str | None = None,
    threads: int = 2,
) -> Plan:
    """Plan every distinct key of the index that the completion parts lack, once each.

    Order: a walk of the trie that the prefix columns p16, p32, … p4096 span. At each level rows that share
    their first N tokens with another row form a group, and a row that shares them with none stands alone;
    groups and single rows come by descending effort (prompt + OUTPUT_WEIGHT × expected output; a group's is
    its largest), so that what ends last starts first, and members of a group stay adjacent.

    `shared_prefix_tokens` counts, for each group of n rows at level N, (n - 1) times the tokens between the
    level below and N. Sharing beyond a row's deepest common level is not seen, so it is a lower bound of
    what an ideal cache saves.

    `retry_errors`: completions that are retryable errors count as missing. `memory_limit` bounds DuckDB,
    which spills into `out_dir`. Raises StorageError, OutOfMemory.
    """
    index = sorted(index_dir.glob("part-*.parquet"))
    with connection(out_dir / "spill", memory_limit, threads) as database:
        _load_work(database, index, completion_parts, retry_errors)
        saved = sum(_group_level(database, level) for level in range(len(PREFIX_LENGTHS)))
        path = out_dir / "plan.parquet"
        _write(database, path)
        return Plan(path=path, shared_prefix_tokens=saved, **_counts(database))


def _load_work(database: Any, index: Sequence[Path], completions: Sequence[Path], retry_errors: bool) -> None:
    prefixes = ", ".join(f"{name} BIGINT" for name in PREFIX_COLUMNS)
    database.execute(
        "CREATE TEMP TABLE wanted(key BLOB, token_offset BIGINT, token_count INTEGER, params VARCHAR, "
        f"expected_tokens INTEGER, total INTEGER, effort BIGINT, users INTEGER, {prefixes})"
    )
    database.execute("CREATE TEMP TABLE present(key BLOB)")
    database.execute("CREATE TEMP TABLE tally(rows BIGINT, error_rows BIGINT)")
    if index:
        database.execute(f"INSERT INTO wanted {_distinct_sql(index)}")
        database.execute(f"INSERT INTO tally SELECT count(*), count(*) - count(key) FROM {parquet(index)}")
    if completions:
        usable = "WHERE error_code IS NULL OR retryable IS NOT TRUE" if retry_errors else ""
        database.execute(f"INSERT INTO present SELECT DISTINCT key FROM {parquet(completions)} {usable}")
    database.execute("CREATE TEMP TABLE work AS SELECT * FROM wanted ANTI JOIN present USING (key)")


def _distinct_sql(index: Sequence[Path]) -> str:
    # equal keys mean equal tokens and parameters: only the offset differs, and the smallest is as good as any
    same = ", ".join(f"min({name})" for name in PREFIX_COLUMNS)
    return (
        "SELECT key, min(token_offset), min(token_count), min(params), min(expected_tokens), "
        "min(token_count) + min(expected_tokens), "
        f"min(token_count) + {OUTPUT_WEIGHT} * min(expected_tokens)::BIGINT, count(*), {same} "
        f"FROM {parquet(index)} WHERE key IS NOT NULL GROUP BY key"
    )


def _group_level(database: Any, level: int) -> int:
    """Find the groups of one ladder level; prompt tokens saved by sharing between this level and the one
    below.
    """
    name = PREFIX_COLUMNS[level]
    database.execute(
        f"CREATE TEMP TABLE groups_{name} AS SELECT {name} AS id, max(effort) AS effort, count(*) AS members "
        f"FROM work WHERE {name} IS NOT NULL GROUP BY {name} HAVING count(*) > 1"
    )
    step = PREFIX_LENGTHS[level] - (PREFIX_LENGTHS[level - 1] if level else 0)
    saved = database.execute(f"SELECT coalesce(sum(members - 1), 0) FROM groups_{name}").fetchall()
    return int(saved[0][0]) * step


def _write(database: Any, path: Path) -> None:
    query = database.sql(_ordered_sql())
    done = 0
    with naming_errors(path), storage(path, "write"):
        writer = pq.ParquetWriter(path, PLAN_SCHEMA, compression="zstd", write_page_checksum=True)
        for batch in query.to_arrow_reader(_ROWS_PER_GROUP):
            seq = pa.array(range(done, done + batch.num_rows), pa.int64())
            columns = [
                seq,
                *(batch.column(i).cast(PLAN_SCHEMA.types[i + 1]) for i in range(batch.num_columns)),
            ]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=PLAN_SCHEMA))
            done += batch.num_rows
        writer.close()  # on success only


def _ordered_sql() -> str:
    joins = " ".join(f"LEFT JOIN groups_{name} ON work.{name} = groups_{name}.id" for name in PREFIX_COLUMNS)
    trie = ", ".join(
        f"coalesce(groups_{name}.effort, work.effort) DESC, groups_{name}.id NULLS LAST"
        for name in PREFIX_COLUMNS
    )
    deepest_first = tuple(zip(PREFIX_COLUMNS, PREFIX_LENGTHS, strict=True))[::-1]
    group = ", ".join(f"groups_{name}.id" for name, _ in deepest_first)
    depth = " ".join(f"WHEN groups_{name}.id IS NOT NULL THEN {length}" for name, length in deepest_first)
    return (
        "SELECT key, token_offset, token_count, params, expected_tokens, "
        "ceil(log2(greatest(total, 1)))::INTEGER AS bucket, "
        f"coalesce({group}) AS prefix_group, CASE {depth} ELSE 0 END AS prefix_tokens, users "
        f"FROM work {joins} ORDER BY {trie}, work.effort DESC, key"
    )


def _counts(database: Any) -> dict[str, int]:
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
    ]
    values = database.execute(
        "WITH t AS (SELECT coalesce(sum(rows), 0) r, coalesce(sum(error_rows), 0) e FROM tally), "
        "w AS (SELECT count(*) n FROM wanted), "
        "k AS (SELECT count(*) n, coalesce(sum(token_count::BIGINT), 0) p, "
        "coalesce(sum(expected_tokens::BIGINT), 0) o, coalesce(max(total), 0) l FROM work) "
        "SELECT t.r, t.e, w.n, t.r - t.e - w.n, w.n - k.n, k.n, k.p, k.o, k.l FROM t, w, k"
    ).fetchall()
    return {name: int(value) for name, value in zip(names, values[0], strict=True)}
