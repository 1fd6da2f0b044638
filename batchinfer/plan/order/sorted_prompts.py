"""Prompts in the order of their tokens, and the prefixes that they share: sorted on disk, in two passes.

The first pass sorts by the hashes of whole blocks, which are a sixteenth of the tokens' number, and finds a forest of
shared blocks. The second one reads, of what lies at a node, the block in which it parts from the others, and sorts by
that: then prompts that part in the middle of a block stand together, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from batchinfer.core.prefix_forest import ForestBuilder, Ints, PrefixForest
from batchinfer.plan.order.block_hashes import BLOCK, HASH_BYTES, Hashes, block_hashes, shared_blocks
from batchinfer.plan.order.block_tails import common_tokens, from_arrow, read_tails, to_arrow
from batchinfer.plan.order.requests import Prompts, read_prompts
from batchinfer.plan.order.run_order import places_in

_ROWS = 65_536  # that are held at a time
_CHAIN_BYTES = 8 << 20  # of hashes that are held at a time, whose comparison takes six times as much


def sorted_prompts(database: Any, prompts: Prompts, roots: Hashes) -> tuple[PrefixForest, Ints]:
    """Return the forest of the prompts of the table `work`, and their rows (`rowid`) in the order in which it has them:
    that of their roots, then of their tokens without the last one, which always runs; equal ones as in the table.

    `roots`: the number of each row's content root; prompts whose roots differ share nothing. Raises StorageError.
    """
    blocks, rows = _by_blocks(database, prompts, roots)
    items, common = _by_tails(database, prompts, blocks, rows, roots)
    shared, places = _refined(blocks, items, common)
    builder, found = ForestBuilder(), np.empty_like(rows)
    for start in range(0, len(shared), _ROWS):
        builder.add(shared[start : start + _ROWS].tolist())
    found[places] = rows
    return builder.finished(), found


def _by_blocks(database: Any, prompts: Prompts, roots: Hashes) -> tuple[PrefixForest, Ints]:
    """Return the forest of whole blocks, and the rows in the order of their blocks' hashes."""
    raised: list[BaseException] = []

    def chains(numbers: pa.Array, offsets: pa.Array, counts: pa.Array) -> pa.Array:
        try:
            own, done, found = roots[numbers.to_numpy()], 0, list[bytes]()
            for some in read_prompts(prompts, offsets.to_numpy(), counts.to_numpy()):
                found += block_hashes(some, own[done : done + len(some)])
                done += len(some)
            return pa.array(found, pa.binary())
        except BaseException as error:  # a signal's, too; DuckDB would tell of it as of a damaged file
            raised.append(error)
            raise

    kinds: list[Any] = ["BIGINT", "BIGINT", "INTEGER"]
    database.create_function("chain", chains, kinds, "BLOB", type="arrow")
    query = database.sql(
        "SELECT rowid, chain(rowid, token_offset, token_count) AS chain FROM work ORDER BY chain, rowid"
    )
    builder, rows, before = ForestBuilder(), [np.zeros(0, np.int32)], b""
    try:
        for batch in query.to_arrow_reader(_rows_of_chains(database)):
            found = batch.column(1).to_pylist()
            builder.add((shared_blocks(found, before) * BLOCK).tolist())
            rows.append(batch.column(0).to_numpy().astype(np.int32))
            before = found[-1]
    except duckdb.Error as error:
        if raised:
            raise raised[0] from error
        raise
    return builder.finished(), np.concatenate(rows)


def _rows_of_chains(database: Any) -> int:
    longest = int(database.execute("SELECT coalesce(max(token_count), 0) FROM work").fetchall()[0][0])
    return min(_ROWS, max(1, _CHAIN_BYTES // max(1, longest // BLOCK * HASH_BYTES)))


def _by_tails(
    database: Any, prompts: Prompts, blocks: PrefixForest, rows: Ints, roots: Hashes
) -> tuple[Ints, Ints]:
    """Return the items that lie at each node of the forest of blocks and no deeper, sorted by the tokens behind the
    node (prompts by their number in sorted order, and behind them the nodes), and how many of these tokens each has in
    common with the one before it. Items whose roots differ have none in common: they meet where they share no block."""
    database.execute("CREATE TEMP TABLE tails(node INTEGER, root UBIGINT, item INTEGER, tail BLOB)")
    for batch in _tails(database, prompts, blocks, rows, roots):
        database.register("batch", batch)
        database.execute("INSERT INTO tails SELECT * FROM batch")
        database.unregister("batch")
    items, common = np.empty((2, len(rows) + len(blocks)), np.int32)
    done, before, root_before = 0, np.zeros((1, BLOCK), np.uint32), np.zeros(1, np.uint64)
    query = database.sql("SELECT item, root, tail FROM tails ORDER BY node, root, tail, item")
    for batch in query.to_arrow_reader(_ROWS):
        end, root, found = done + batch.num_rows, batch.column(1).to_numpy(), from_arrow(batch.column(2))
        items[done:end] = batch.column(0).to_numpy()
        same = root == np.concatenate([root_before, root[:-1]])
        common[done:end] = np.where(same, common_tokens(found, before), 0)
        done, before, root_before = end, found[-1:], root[-1:]
    database.execute("DROP TABLE tails")
    return items, common


def _tails(
    database: Any, prompts: Prompts, blocks: PrefixForest, rows: Ints, roots: Hashes
) -> Iterator[pa.RecordBatch]:
    """Yield batches of (node, root, item, tail), in the order of their places in the store: prompts, then nodes."""
    found = database.sql("SELECT token_offset, token_count FROM work").fetchnumpy()
    depths = np.append(blocks.depth, np.int32(0))  # last, where ROOT points, that of no node
    around, firsts = blocks.around, blocks.firsts
    items = np.concatenate([np.argsort(rows), len(rows) + np.argsort(rows[blocks.first])]).astype(np.int32)
    for start in range(0, len(items), _ROWS):
        some = items[start : start + _ROWS]
        node, row = around[some], rows[firsts[some]]
        starts = found["token_offset"][row] + depths[node]
        left = found["token_count"][row] - 1 - depths[node]
        tails = to_arrow(read_tails(prompts, starts, left))
        yield pa.record_batch([node, roots[row], some, tails], ["node", "root", "item", "tail"])


def _refined(blocks: PrefixForest, items: Ints, common: Ints) -> tuple[Ints, Ints]:
    """Return how many tokens each prompt has in common with the one before it in the order of tokens, and the places in
    that order of the prompts in the order of blocks."""
    places = places_in(blocks, items)
    around, depths = blocks.around[items], np.append(blocks.depth, np.int32(0))
    behind = np.flatnonzero(np.diff(around) == 0) + 1  # those that are not the first at their node
    shared = np.zeros(len(blocks.node_of), np.int32)
    shared[places[items[behind]]] = depths[around[behind]] + common[behind]
    return shared, places[: len(shared)]
