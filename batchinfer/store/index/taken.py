"""Leading rows of an index that are taken over whole from the last run: they are neither read nor written again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchinfer.core.errors import StorageError
from batchinfer.filesystem.durable import FileOps, storage
from batchinfer.store.kept.facts import StretchFacts
from batchinfer.store.kept.whole import FAILED, PLACES, WholeStretch, taken_file

INDEX, CARRIED = "index", "carried"  # how the files of a stretch are called


@dataclass(frozen=True, slots=True)
class TakenStretch:
    """A stretch is taken over with its parts of the index, those of what it carries, and the files with the places of
    its answers and with the keys of those that are errors: all have names that are this run's."""

    stretch: WholeStretch
    facts: StretchFacts
    parts: tuple[Path, ...]
    carried: tuple[Path, ...]
    places: Path
    failed: Path


@dataclass(frozen=True, slots=True)
class TakenRows:
    """The first rows of an index: those of whole stretches. All of them have their answers."""

    stretches: tuple[TakenStretch, ...] = ()

    @property
    def rows(self) -> int:
        """Return how many rows there are."""
        return sum(one.stretch.rows for one in self.stretches)

    @property
    def errors(self) -> int:
        """Return how many of them are error rows."""
        return sum(one.stretch.errors[0] for one in self.stretches)

    @property
    def retryable(self) -> int:
        """Return how many of the error rows another run may cure."""
        return sum(one.stretch.errors[1] for one in self.stretches)

    @property
    def distinct(self) -> int:
        """Return how many different keys they have."""
        return self.stretches[-1].stretch.distinct if self.stretches else 0

    @property
    def parts(self) -> list[Path]:
        """Return the parts of the index that have them."""
        return [part for one in self.stretches for part in one.parts]

    @property
    def carried(self) -> list[Path]:
        """Return the parts with the columns that they carry."""
        return [part for one in self.stretches for part in one.carried]

    @property
    def facts(self) -> list[StretchFacts]:
        """Return what is known of them together."""
        return [one.facts for one in self.stretches]


NOTHING_TAKEN = TakenRows()


def taken_over(
    kept: Path,
    known: Sequence[tuple[WholeStretch, StretchFacts]],
    index: Path,
    carried: Path,
    ops: FileOps,
    notice: Callable[[str], None],
) -> TakenRows:
    """Take over these stretches as the first parts of an index whose folders these are. Where a file of one is not as
    it was, or another run has removed it, that is told, and the stretches before it are all. Raises StorageError."""
    found: list[TakenStretch] = []
    for stretch, facts in known:
        before = TakenRows(tuple(found))
        parts = _parts(stretch, INDEX, index, len(before.parts))
        columns = _parts(stretch, CARRIED, carried, len(before.carried))
        beside = {name: index.parent / f"{len(found):05d}-{name}" for name in (PLACES, FAILED)}
        names = parts | columns | beside
        try:
            for name, path in names.items():
                taken_file(kept, stretch, name, path, ops)
        except StorageError as error:
            notice(f"rows that did not change are read again: {error}")
            for path in names.values():
                with storage(path, "remove"):
                    ops.unlink(path)
            return before
        found.append(TakenStretch(stretch, facts, (*parts.values(),), (*columns.values(),), *beside.values()))
    return TakenRows(tuple(found))


def _parts(stretch: WholeStretch, kind: str, folder: Path, before: int) -> dict[str, Path]:
    """Return the names that the parts of a stretch get in an index that has so many before them."""
    names = stretch.parts(kind)
    return {name: folder / f"part-{number:05d}.parquet" for number, name in enumerate(names, before)}
