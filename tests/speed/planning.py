"""The planner, and the search for duplicates, over an index of made-up rows."""

from __future__ import annotations

import json
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.config import REQUEST_BATCH
from batchinfer.filesystem.durable import FileOps
from batchinfer.filesystem.part_writer import PART_ROWS
from batchinfer.plan.order import planner, sorted_prompts
from batchinfer.plan.order.requests import planned_requests
from batchinfer.store.index import duplicates
from batchinfer.store.index.index import INDEX_SCHEMA, Layout
from batchinfer.store.index.token_store import TokenStore
from tests.speed.processes import apart
from tests.suite.section import BenchSection, Part, Result

REPEATED = ("duplicates", "samples")
VOCABULARY = 50_000
ROOTS = ContentRoots(1 << 20)
# Functions whose times are told, where the code has them
PHASES = {
    planner: ("_load_wanted", "_load_work", "sorted_prompts", "_place", "write_plan", "write_prefixes"),
    sorted_prompts: ("_by_blocks", "_by_tails", "_refined"),
}

Ints = NDArray[np.int64]


def prompts_of(
    kind: str, rows: Ints, rng: np.random.Generator
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the token ids of some rows, end to end, and how many each has.

    Args:
        kind: Rows share nothing (unique) or 79 tokens (system), branch at each of ten levels (tree), repeat the row
            before them (duplicates, samples), or share 1,000 tokens with nine others (long).
    """
    own = rng.integers(0, VOCABULARY, (len(rows), 40), np.int32)
    shared = np.broadcast_to(np.arange(79, dtype=np.int32), (len(rows), 79))
    if kind == "tree":  # of four branches at each of ten levels, 12 tokens a level
        digits = (rows[:, None] >> (2 * np.arange(10))) & 3
        prompts = np.hstack([np.repeat(digits, 12, axis=1).astype(np.int32), own[:, :6]])
    elif kind == "system":
        prompts = np.hstack([shared, own])
    elif kind == "long":  # documents of 1,000 tokens, about each of which ten questions are asked
        documents = np.random.default_rng(3).integers(0, VOCABULARY, (4096, 1000), np.int32)
        prompts = np.hstack([documents[rows // 10 % 4096], own])
    else:
        prompts = own
    counts = np.full(len(rows), prompts.shape[1], np.int32)
    counts -= rng.integers(0, 24, len(rows)).astype(np.int32)
    if kind in REPEATED:
        prompts, counts = _repeated(prompts), _repeated(counts)
    return prompts[np.arange(prompts.shape[1]) < counts[:, None]], counts


def _repeated(values: Any) -> Any:
    """Return values of which every other one is that of the row before it."""
    return np.repeat(values[::2], 2, axis=0)[: len(values)]


def write_index(folder: Path, kind: str, rows: int) -> Layout:
    """Write an index as ingest does, without the marker."""
    layout = Layout(folder)
    layout.index.mkdir(parents=True)
    layout.tokens.parent.mkdir()
    offset = 0
    with layout.tokens.open("wb") as store:
        for number, start in enumerate(range(0, rows, PART_ROWS)):
            some = np.arange(start, min(rows, start + PART_ROWS))
            tokens, counts = prompts_of(kind, some, np.random.default_rng(number))
            store.write(tokens.tobytes())
            offsets = offset + np.cumsum(counts, dtype=np.int64) - counts
            offset += len(tokens)
            table = pa.table(_columns(kind, some, offsets, counts), schema=INDEX_SCHEMA)
            pq.write_table(
                table,
                layout.index / f"part-{number:05d}.parquet",
                row_group_size=8192,
                compression="zstd",
                compression_level=1,
                write_page_checksum=True,
            )
    return layout


def _columns(kind: str, rows: Ints, offsets: Ints, counts: NDArray[np.int32]) -> dict[str, Any]:
    rng = np.random.default_rng(int(rows[0]) + 7)
    size = len(rows)
    keys = rng.integers(0, 1 << 63, (size, 4), np.int64)
    outputs = rng.integers(1, 65, size).astype(np.int32)
    if kind in REPEATED:
        keys, outputs = _repeated(keys), _repeated(outputs)
    longest = [SamplingParams(max_tokens=64, temperature=float(kind == "samples")).canonical().to_json()]
    nothing = {name: pa.nulls(size, INDEX_SCHEMA.field(name).type) for name in INDEX_SCHEMA.names[-4:]}
    return {
        "row_id": rows,
        "file": pa.array(["in.jsonl"] * size),
        "row_index": rows,
        "custom_id": pa.array([f"row-{row}" for row in rows.tolist()]),
        "key": pa.FixedSizeBinaryArray.from_buffers(pa.binary(32), size, [None, pa.py_buffer(keys)]),
        "token_offset": offsets,
        "token_count": counts,
        "params": pa.array(longest * size),
        "greedy": pa.array([kind != "samples"] * size),
        "expected_tokens": outputs,
        **nothing,
    }


class PhaseTimes:
    """Seconds, and seconds of CPU of all threads, by name."""

    def __init__(self) -> None:
        self.found = Counter[str]()

    def timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a call that adds its times under this name."""

        def inner(*given: Any, **more: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                return call(*given, **more)
            finally:
                times = {f"{name}_s": time.perf_counter() - wall, f"{name}_cpu_s": time.process_time() - cpu}
                self.found.update(times)  # type: ignore[arg-type]

        return inner


def measure(index: str, threads: int, place: str) -> None:
    """Print seconds, seconds of CPU and the most memory of this process."""
    out, watch = Path(place), PhaseTimes()
    for module, names in PHASES.items():
        for name in names:
            if hasattr(module, name):
                setattr(module, name, watch.timed(getattr(module, name), name.strip("_")))
    shutil.copytree(Path(index) / "index", out / "index")  # equal samples are given their numbers in place
    tokens, parts = TokenStore(Layout(Path(index)).tokens), sorted((out / "index").glob("part-*.parquet"))
    equal = duplicates.EqualRows(out / "equal", b"", FileOps(), unique_ids=True)
    watch.timed(equal.settle, "settling_of_equal_rows")(parts, tokens)
    plan_job = watch.timed(planner.plan_job, "plan_job")
    plan = plan_job(parts, tokens, [], out / "plan", ROOTS, threads=threads)
    batches = planned_requests(plan, tokens, REQUEST_BATCH, ROOTS, 50)
    watch.timed(list, "every_50th_batch_of_requests")(batches)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(json.dumps({"rows": plan.rows, "to_run": plan.to_run, "peak_bytes": most, **watch.found}))


def parts(section: BenchSection) -> list[Part]:
    """Return a part for each kind of rows, which is planned in a process of its own."""
    return [(kind, partial(_planned, section, kind)) for kind in section.given.kinds]


def _planned(section: BenchSection, kind: str) -> Result:
    """Tell seconds, seconds of CPU and the most memory; of the functions in PHASES, where the code has them."""
    given, out = section.given, section.place / "out"
    folder = (given.folder or section.place) / f"{kind}-{given.rows}"
    if not folder.exists():
        write_index(folder, kind, given.rows)
    out.mkdir()
    figures = apart(measure, folder.resolve(), given.threads, out)
    shutil.rmtree(out)
    return Result(kind, figures=figures)
