from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from batchinfer.filesystem.durable import FileOps
from batchinfer.store.kept.chunks import KeptWriter
from batchinfer.store.kept.facts import SegmentFacts
from batchinfer.store.kept.files import MARKER, KeptMarker, KeptSegment, read_marker, replace_marker


def test_runs_that_end_at_the_same_time_keep_one_index(tmp_path: Path) -> None:
    """Runs of a job for several dates share the kept index."""
    kept = tmp_path / "kept"

    def commit(identity: str) -> None:
        writer = KeptWriter(kept, FileOps())
        segment = KeptSegment(writer.folder, writer.finish(SegmentFacts()), ())
        replace_marker(kept, KeptMarker(identity, (segment,)), FileOps())

    names = [f"run {number}" for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(commit, names))) == len(names)
    marker = read_marker(kept)
    assert marker is not None
    assert marker.identity in names
    assert sorted(entry.name for entry in kept.iterdir()) == sorted([MARKER, *marker.folders])
