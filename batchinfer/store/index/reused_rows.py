"""Leading rows of an index that are taken over whole from the last run: they are neither read nor written again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchinfer.core.errors import StorageError
from batchinfer.filesystem.durable import FileOps, storage
from batchinfer.store.kept.facts import SegmentFacts
from batchinfer.store.kept.finished import FAILED, POSITIONS, FinishedSegment, reuse_file

INDEX, CARRIED = "index", "carried"  # how the files of a segment are called


@dataclass(frozen=True, slots=True)
class ReusedSegment:
    """A segment is taken over with its parts of the index, those of what it carries, and the files with the places of
    its answers and with the keys of those that are errors: all have names that are this run's."""

    segment: FinishedSegment
    facts: SegmentFacts
    parts: tuple[Path, ...]
    carried: tuple[Path, ...]
    places: Path
    failed: Path


@dataclass(frozen=True, slots=True)
class ReusedRows:
    """The first rows of an index: those of whole segments. All of them have their answers."""

    segments: tuple[ReusedSegment, ...] = ()

    @property
    def rows(self) -> int:
        """Return how many rows there are."""
        return sum(one.segment.rows for one in self.segments)

    @property
    def errors(self) -> int:
        """Return how many of them are error rows."""
        return sum(one.segment.errors[0] for one in self.segments)

    @property
    def retryable(self) -> int:
        """Return how many of the error rows another run may cure."""
        return sum(one.segment.errors[1] for one in self.segments)

    @property
    def distinct(self) -> int:
        """Return how many different keys they have."""
        return self.segments[-1].segment.distinct if self.segments else 0

    @property
    def parts(self) -> list[Path]:
        """Return the parts of the index that have them."""
        return [part for one in self.segments for part in one.parts]

    @property
    def carried(self) -> list[Path]:
        """Return the parts with the columns that they carry."""
        return [part for one in self.segments for part in one.carried]

    @property
    def facts(self) -> list[SegmentFacts]:
        """Return what is known of them together."""
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
    """Take over these segments as the first parts of an index whose folders these are. Where a file of one is not as
    it was, or another run has removed it, that is told, and the segments before it are all. Raises StorageError."""
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
            notice(f"rows that did not change are read again: {error}")
            for path in names.values():
                with storage(path, "remove"):
                    ops.unlink(path)
            return before
        found.append(
            ReusedSegment(segment, facts, (*parts.values(),), (*columns.values(),), *beside.values())
        )
    return ReusedRows(tuple(found))


def _parts(segment: FinishedSegment, kind: str, folder: Path, before: int) -> dict[str, Path]:
    """Return the names that the parts of a segment get in an index that has so many before them."""
    names = segment.parts(kind)
    return {name: folder / f"part-{number:05d}.parquet" for number, name in enumerate(names, before)}
