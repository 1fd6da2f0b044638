"""Sorts prompts by their tokens and finds common prefixes: on disk, in two passes.

The first pass sorts by block hashes, which are a sixteenth of the data, and builds a tree of shared blocks. The
second pass reads the block in which the prompts of a node diverge and sorts by its tokens. So prompts that diverge
within a block are grouped too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.core.prefix_forest import Ints, PrefixForest, prefix_forest
from batchinfer.plan.order.block_hashes import (
    BLOCK,
    HASH_BYTES,
    NO_CHAIN,
    Hashes,
    block_hashes,
    chain_lengths,
    chains_from_arrow,
    chains_to_arrow,
    shared_blocks,
)
from batchinfer.plan.order.requests import Prompts, read_together
from batchinfer.plan.order.run_order import places_in

# Two tokens per column. DuckDB sorts integers in less than half the time of byte strings
# (docs/measurements/prefixes.md).
TAIL_COLUMNS = tuple(f"tail{at}" for at in range(BLOCK // 2))

Tails = NDArray[np.uint32]  # (prompts, BLOCK): token ids + 1, and 0 after the end of a prompt
_ROWS = 65_536  # rows in memory at a time
_CHAIN_BYTES = 8 << 20  # bytes of hashes in memory at a time; comparing them takes six times as much
_TAIL_COLUMNS = ("node", "root", "item", *TAIL_COLUMNS)
_CHAIN_SCHEMA = pa.schema([("number", pa.int32()), ("chain", pa.binary())])


def read_tails(prompts: Prompts, offsets: NDArray[np.int64], counts: NDArray[np.int64]) -> Tails:
    """Read up to BLOCK tokens of each prompt, from a given position in the prompt.

    Args:
        prompts: The token ids of all prompts.
        offsets: Position in `prompts` of the first token to read, for each prompt.
        counts: Number of tokens from there to the end of the prompt.

    Returns:
        An array of shape [prompts, BLOCK] with token ids + 1, and 0 after the end of a prompt.
    """
    counts = np.minimum(counts, BLOCK)
    found = np.zeros((len(offsets), BLOCK), np.uint32)
    for some, tokens, starts in read_together(prompts, offsets, counts):
        at = starts[:, None] + np.arange(BLOCK)
        inside = np.arange(BLOCK) < counts[some, None]
        found[some][inside] = tokens[at[inside]].astype(np.uint32) + 1
    return found


def common_tokens(tails: Tails, before: Tails) -> Ints:
    """Return how many leading tokens each row of `tails` has in common with the previous row: one number per row.

    Args:
        tails: Token ids + 1, from `read_tails`; shape [prompts, BLOCK].
        before: The row that precedes the first row of `tails`, shape [1, BLOCK].
    """
    differ = (tails == 0) | (tails != np.concatenate([before, tails[:-1]]))
    return np.where(differ.any(axis=1), differ.argmax(axis=1), BLOCK).astype(np.int32)


def to_columns(tails: Tails) -> list[NDArray[np.uint64]]:
    """Pack the tokens of prompts into BLOCK / 2 integer columns, two tokens per value.

    A database sorts rows of these columns in the order of the tokens.

    Args:
        tails: Token ids + 1, from `read_tails`; shape [prompts, BLOCK].
    """
    pairs = tails.astype(np.uint64).reshape(-1, BLOCK // 2, 2)
    return list(np.ascontiguousarray((pairs[:, :, 0] << np.uint64(32) | pairs[:, :, 1]).T))


def from_columns(columns: list[NDArray[np.uint64]]) -> Tails:
    """Unpack the tokens of prompts from the columns of `to_columns`.

    Returns:
        Token ids + 1, and 0 after the end of a prompt; shape [prompts, BLOCK].
    """
    pairs = np.stack(columns, axis=1)
    return (
        np.stack([pairs >> np.uint64(32), pairs & np.uint64(0xFFFFFFFF)], axis=2)
        .astype(np.uint32)
        .reshape(-1, BLOCK)
    )


def sorted_prompts(database: Any, prompts: Prompts, roots: Hashes) -> tuple[PrefixForest, Ints]:
    """Sort the prompts of the table `work`, and build their prefix tree.

    Prompts are sorted by their number in `roots`, then by all tokens except the last one, which is always computed.
    Equal prompts keep the order of the table.

    Args:
        database: A DuckDB connection with the table `work` of all requests.
        prompts: The token ids of all prompts.
        roots: A number per row of `work`. Prompts with different numbers share nothing.

    Returns:
        The prefix tree of the sorted prompts, and the row number in `work` of each sorted prompt.

    Raises:
        StorageError: The token ids cannot be read.
    """
    found = database.sql("SELECT token_offset, token_count FROM work").fetchnumpy()
    work = _WorkPrompts(prompts, found["token_offset"], found["token_count"], roots)
    blocks, rows = _by_blocks(database, work)
    items, common = _by_tails(database, work, blocks, rows)
    shared, at = _refined(blocks, items, common)
    ordered = np.empty_like(rows)
    ordered[at] = rows
    return prefix_forest(shared), ordered


@dataclass(frozen=True, slots=True, eq=False)
class _WorkPrompts:
    """The prompts of the table `work`.

    Attributes:
        prompts: The token ids of all prompts.
        offsets: Position in `prompts` of each prompt of the table.
        counts: Number of tokens of each prompt.
        roots: A number per prompt. Prompts with different numbers share nothing.
    """

    prompts: Prompts
    offsets: NDArray[np.int64]
    counts: NDArray[np.int32]
    roots: Hashes

    def chains(self) -> Iterator[pa.RecordBatch]:
        for start in range(0, len(self.counts), _ROWS):
            rows = slice(start, start + _ROWS)
            counts, roots = self.counts[rows], self.roots[rows]
            for some, tokens, starts in read_together(self.prompts, self.offsets[rows], counts):
                found = block_hashes(tokens, starts, counts[some], roots[some])
                numbers = np.arange(start + some.start, start + some.stop, dtype=np.int32)
                yield pa.record_batch([numbers, chains_to_arrow(found)], schema=_CHAIN_SCHEMA)

    def tails(self, blocks: PrefixForest, rows: Ints) -> Iterator[pa.RecordBatch]:
        # For each prompt and each node, the tokens after the prefix of its parent. Prompts come before nodes,
        # both in the order of the token store, so that reads are sequential.
        depths = np.append(blocks.depth, np.int32(0))  # ROOT (-1) selects the appended 0
        parents, firsts = blocks.parents, blocks.first_prompts
        nodes = len(rows) + np.argsort(rows[blocks.first])
        items = np.concatenate([np.argsort(rows), nodes]).astype(np.int32)
        for start in range(0, len(items), _ROWS):
            some = items[start : start + _ROWS]
            node, row = parents[some], rows[firsts[some]]
            left = self.counts[row] - 1 - depths[node]
            tails = to_columns(read_tails(self.prompts, self.offsets[row] + depths[node], left))
            yield pa.record_batch([node, self.roots[row], some, *tails], [*_TAIL_COLUMNS])


def _by_blocks(database: Any, work: _WorkPrompts) -> tuple[PrefixForest, Ints]:
    rows, shared = np.empty((2, len(work.counts)), np.int32)
    done, before = 0, NO_CHAIN
    with _given(database, "chains", _CHAIN_SCHEMA, work.chains()):
        query = database.sql("SELECT number, chain FROM chains ORDER BY chain, number")
        for batch in query.to_arrow_reader(_rows_of_chains(work)):
            end, found = done + batch.num_rows, chains_from_arrow(batch.column(1)).prepend(before)
            rows[done:end] = batch.column(0).to_numpy()
            shared[done:end] = shared_blocks(found) * BLOCK
            done, before = end, found.last()
    return prefix_forest(shared), rows


@contextmanager
def _given(database: Any, name: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[None]:
    # Errors that `batches` raises are raised unchanged
    raised: list[BaseException] = []

    def noted() -> Iterator[pa.RecordBatch]:
        try:
            yield from batches
        except BaseException as error:  # including signals, which DuckDB would report as a damaged file
            raised.append(error)
            raise

    database.register(name, pa.RecordBatchReader.from_batches(schema, noted()))
    try:
        yield
    except duckdb.Error as error:
        if raised:
            raise raised[0] from error
        raise
    finally:
        database.unregister(name)


def _rows_of_chains(work: _WorkPrompts) -> int:
    longest = int(chain_lengths(work.counts).max(initial=0))
    return min(_ROWS, max(1, _CHAIN_BYTES // max(1, longest * HASH_BYTES)))


def _by_tails(database: Any, work: _WorkPrompts, blocks: PrefixForest, rows: Ints) -> tuple[Ints, Ints]:
    # Sorts the children of each node by their tokens after the node's prefix. Returns the children, numbered as
    # in `PrefixForest.parents`, and how many of these tokens each has in common with the previous one.
    tail = ", ".join(TAIL_COLUMNS)
    kinds = ", ".join(f"{name} UBIGINT" for name in TAIL_COLUMNS)
    database.execute(f"CREATE TEMP TABLE tails(node INTEGER, root UBIGINT, item INTEGER, {kinds})")
    for batch in work.tails(blocks, rows):
        database.register("batch", batch)
        database.execute("INSERT INTO tails SELECT * FROM batch")
        database.unregister("batch")
    items, common = np.empty((2, len(rows) + len(blocks)), np.int32)
    done, before, root_before = 0, np.zeros((1, BLOCK), np.uint32), np.zeros(1, np.uint64)
    query = database.sql(f"SELECT item, root, {tail} FROM tails ORDER BY node, root, {tail}, item")
    for batch in query.to_arrow_reader(_ROWS):
        end, (item, root, *columns) = done + batch.num_rows, (one.to_numpy() for one in batch.columns)
        found, items[done:end] = from_columns(columns), item
        same = root == np.concatenate([root_before, root[:-1]])
        common[done:end] = np.where(same, common_tokens(found, before), 0)
        done, before, root_before = end, found[-1:], root[-1:]
    database.execute("DROP TABLE tails")
    return items, common


def _refined(blocks: PrefixForest, items: Ints, common: Ints) -> tuple[Ints, Ints]:
    # Returns how many tokens each prompt shares with the previous one in token order, and its new position
    places = places_in(blocks, items)
    parents, depths = blocks.parents[items], np.append(blocks.depth, np.int32(0))
    behind = np.flatnonzero(np.diff(parents) == 0) + 1  # items that are not the first of their node
    shared = np.zeros(len(blocks.node_of), np.int32)
    shared[places[items[behind]]] = depths[parents[behind]] + common[behind]
    return shared, places[: len(shared)]
