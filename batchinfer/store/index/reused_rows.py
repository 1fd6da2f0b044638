"""The first rows of an index, reused from the last run: they are neither read nor written again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchinfer.core.errors import StorageError
from batchinfer.filesystem.durable import FileOps, storage
from batchinfer.store.kept.facts import SegmentFacts
from batchinfer.store.kept.finished import FAILED, POSITIONS, FinishedSegment, reuse_file

INDEX, CARRIED = "index", "carried"  # prefixes of a segment's file names


@dataclass(frozen=True, slots=True)
class ReusedSegment:
    """A segment of the last run's kept index whose files were linked or copied into the index of this run.

    Attributes:
        segment: The record of the segment.
        facts: Totals over its rows.
        parts: Its parts of the index.
        carried: Its parts with passthrough columns.
        places: The file with the positions of its answers in the store.
        failed: The file with the rows whose answers are errors.
    """

    segment: FinishedSegment
    facts: SegmentFacts
    parts: tuple[Path, ...]
    carried: tuple[Path, ...]
    places: Path
    failed: Path


@dataclass(frozen=True, slots=True)
class ReusedRows:
    """The rows at the start of an index that were reused from the last run, in whole segments.

    Each of them has an answer or is an error row.
    """

    segments: tuple[ReusedSegment, ...] = ()

    @property
    def rows(self) -> int:
        """Return the number of reused rows."""
        return sum(one.segment.rows for one in self.segments)

    @property
    def errors(self) -> int:
        """Return the number of reused rows that could not become requests. Errors of answers do not count."""
        return sum(one.segment.errors[0] for one in self.segments)

    @property
    def retryable(self) -> int:
        """Return how many of the reused rows could not become requests because of a retryable error."""
        return sum(one.segment.errors[1] for one in self.segments)

    @property
    def distinct(self) -> int:
        """Return the number of different work keys of the reused rows."""
        return self.segments[-1].segment.distinct if self.segments else 0

    @property
    def parts(self) -> list[Path]:
        """Return the paths of the index parts that have the reused rows, in row order."""
        return [part for one in self.segments for part in one.parts]

    @property
    def carried(self) -> list[Path]:
        """Return the paths of the passthrough parts of the reused rows, in row order."""
        return [part for one in self.segments for part in one.carried]

    @property
    def facts(self) -> list[SegmentFacts]:
        """Return the totals over the rows of each reused segment, in row order."""
        return [one.facts for one in self.segments]


NO_REUSED_ROWS = ReusedRows()


def reuse_segments(
    kept: Path,
    known: Sequence[tuple[FinishedSegment, SegmentFacts]],
    index: Path,
    carried: Path,
    ops: FileOps,
    notice: Callable[[str], None],
) -> ReusedRows:
    """Link or copy finished segments of the kept index into a new index, as its first parts.

    If a file of a segment is damaged, or another run has removed it, only the segments before it are reused.

    Args:
        kept: The folder of the kept index.
        known: The leading finished segments, with totals over their rows.
        index: The folder for index parts.
        carried: The folder for passthrough parts.
        ops: File operations.
        notice: Called with the reason if a segment cannot be reused.

    Raises:
        StorageError: A file cannot be removed.
    """
    found: list[ReusedSegment] = []
    for segment, facts in known:
        before = ReusedRows(tuple(found))
        parts = _parts(segment, INDEX, index, len(before.parts))
        columns = _parts(segment, CARRIED, carried, len(before.carried))
        beside = {name: index.parent / f"{len(found):05d}-{name}" for name in (POSITIONS, FAILED)}
        names = parts | columns | beside
        try:
            for name, path in names.items():
                reuse_file(kept, segment, name, path, ops)
        except StorageError as error:
            notice(f"unchanged rows cannot be reused and are read again: {error}")
            for path in names.values():
                with storage(path, "remove"):
                    ops.unlink(path)
            return before
        found.append(
            ReusedSegment(segment, facts, (*parts.values(),), (*columns.values(),), *beside.values())
        )
    return ReusedRows(tuple(found))


def _parts(segment: FinishedSegment, kind: str, folder: Path, before: int) -> dict[str, Path]:
    names = segment.parts(kind)
    return {name: folder / f"part-{number:05d}.parquet" for number, name in enumerate(names, before)}
