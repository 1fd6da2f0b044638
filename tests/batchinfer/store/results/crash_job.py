"""A small write-commit-publish job that can be killed at any file operation.

    python -m tests.batchinfer.store.results.crash_job ROOT LAST STEP [THREADS]

runs the job for every STEP-th operation number below LAST in a folder ROOT/<n>: a forked child dies at operation n,
another one runs the job again. If several THREADS write files, the order of operations varies between runs.

Run it as a script: a process that forks must not have threads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from batchinfer.core.content_root import ContentRoots
from batchinfer.filesystem.durable import FileOps
from batchinfer.filesystem.state import StateFolder
from batchinfer.plan.order.planner import plan_job
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.index.index import Index
from batchinfer.store.results import result_files
from batchinfer.store.results.join import join_answers
from batchinfer.store.results.manifest import Manifest, PublishSpec
from batchinfer.store.results.publisher import publish
from tests.batchinfer.filesystem.failing_ops import FailingOps
from tests.batchinfer.store.small_index import answer, decode, mixed_rows, small_index, write_index

Prepare = Callable[[Path], object]
Run = Callable[[Path, FileOps], object]
ROWS, COMMIT, PER_FILE = 24, 7, 10
SPEC = PublishSpec("crash", "0" * 64, ({"path": "in.jsonl", "bytes": 1, "sha256": "ab"},), 1, PER_FILE)


def prepare(folder: Path) -> Index:
    """Write an index, and publish an older result, so publishing has to exchange folders."""
    older = write_index(folder / "older", mixed_rows(13))  # the newer result has the same first file
    run_job(folder, older, FileOps())
    return write_index(folder / "newer", mixed_rows(ROWS))


def run_job(folder: Path, index: Index, ops: FileOps, threads: int = 1) -> Manifest:
    state = StateFolder(folder / "res", ops=ops)
    with state.lock(), CompletionStore(state.completions, rows=COMMIT, ops=ops) as store:
        plan = plan_job(
            index.index_parts,
            index.tokens,
            store.parts(),
            index.folder / "plan",
            ContentRoots(1 << 20),
            threads=1,
        )
        for batch in plan.batches(COMMIT):
            store.append(answer(key) for key in batch.keys)
            store.maybe_commit()
        store.commit()
        join = join_answers(index.index_parts, store.parts(), state.staging / "join")
        with patch.object(result_files, "SPAN_ROWS", PER_FILE):
            return publish(index, join, SPEC, decode, state, threads=threads)


def in_child(work: object) -> int:
    """Run `work()` in a forked child, and return its exit status as os.waitpid does."""
    pid = os.fork()
    if pid == 0:
        work()  # type: ignore[operator]
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def kill_each(numbers: range, root: Path, prepare: Prepare, run: Run, check: Prepare | None = None) -> None:
    """For each operation number, in ROOT/<n>: prepare, run until the kill, `check` the files, run again."""
    for number in numbers:
        folder = root / str(number)
        if in_child(lambda: prepare(folder)):  # noqa: B023 — called at once
            raise SystemExit(f"operation {number}: prepare failed")
        status = in_child(lambda: run(folder, FailingOps(number)))  # noqa: B023
        print(number, "killed" if os.WIFSIGNALED(status) else "ended", flush=True)
        if check and in_child(lambda: check(folder)):  # noqa: B023
            raise SystemExit(f"operation {number}: the check failed")
        if in_child(lambda: run(folder, FileOps())):  # noqa: B023
            raise SystemExit(f"operation {number}: the rerun failed")


if __name__ == "__main__":
    kill_each(
        range(0, int(sys.argv[2]), int(sys.argv[3])),
        Path(sys.argv[1]),
        prepare,
        lambda folder, ops: run_job(
            folder, small_index(folder / "newer", ROWS), ops, int(*sys.argv[4:] or [1])
        ),
    )
