"""Measures ingest: rows a second and by how much the memory of all its processes together grows.

    python tests/batchinfer/data/index/ingest_speed.py [megabytes] [characters of a row]

The last line is JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from tests.batchinfer.data.ingest_kit import checkpoint, make_job, run


class PeakMemory:
    """Samples the resident memory of this process and its children every 20 ms: what is added to that at the start."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._before = _all_resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.peak_bytes = max(self.peak_bytes, _all_resident() - self._before)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _all_resident() -> int:
    me = psutil.Process()
    return sum(map(_resident, [me, *me.children(recursive=True)]))


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it ended meanwhile
        return 0


def write_rows(path: Path, megabytes: float, characters: int) -> int:
    """JSONL of about `megabytes` with texts of about `characters`; the number of rows."""
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "while",
        "we",
        "count",
        "to",
        "forty",
    ]
    rows = written = 0
    with path.open("w") as file:
        while written < megabytes * 1e6:
            text = " ".join(words[(rows * 7 + i * i) % len(words)] for i in range(max(1, characters // 5)))
            written += file.write(json.dumps({"id": rows, "text": text, "label": "x"}) + "\n")
            rows += 1
    return rows


def measure(folder: Path, megabytes: float, characters: int) -> dict[str, float]:
    """Ingest such a file once, with the default number of workers."""
    checkpoint(folder / "model")
    rows = write_rows(folder / "rows.jsonl", megabytes, characters)
    job = make_job(
        folder,
        prompt={"system": "Answer in one word.", "user": "Classify: {{ text }}"},
        columns=("id", "label"),
        path=str(folder / "rows.jsonl"),
        id="id",
    )
    start = time.perf_counter()
    with PeakMemory() as memory:
        index = run(job, workers=None, max_model_len=32768)
    seconds = time.perf_counter() - start
    return {
        "rows": rows,
        "error_rows": index.error_rows,
        "tokens": index.total_tokens,
        "megabytes": (folder / "rows.jsonl").stat().st_size / 1e6,
        "seconds": round(seconds, 2),
        "rows_per_s": round(rows / seconds),
        "tokens_per_s": round(index.total_tokens / seconds),
        "peak_mib": round(memory.peak_bytes / 2**20),
    }


if __name__ == "__main__":
    size = float(sys.argv[1]) if len(sys.argv) > 1 else 300.0
    length = int(sys.argv[2]) if len(sys.argv) > 2 else 300
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(measure(Path(name), size, length)))
