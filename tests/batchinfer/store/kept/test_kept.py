"""The folder of a kept index."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from batchinfer.filesystem.durable import FileOps
from batchinfer.store.kept.chunks import KeptWriter
from batchinfer.store.kept.facts import StretchFacts
from batchinfer.store.kept.files import MARKER, KeptMarker, KeptStretch, put_in_place, read_marker


def test_runs_that_end_at_the_same_time_leave_one(tmp_path: Path) -> None:
    """Runs of a job for several dates share what is kept, and may end at the same moment."""
    kept = tmp_path / "kept"

    def commit(identity: str) -> None:
        writer = KeptWriter(kept, FileOps())
        stretch = KeptStretch(writer.folder, writer.finish(StretchFacts()), ())
        put_in_place(kept, KeptMarker(identity, (stretch,)), FileOps())

    names = [f"run {number}" for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(commit, names))) == len(names)
    marker = read_marker(kept)
    assert marker is not None
    assert marker.identity in names
    assert sorted(entry.name for entry in kept.iterdir()) == sorted([MARKER, *marker.folders])
