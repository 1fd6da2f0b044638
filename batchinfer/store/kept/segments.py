"""Divides a kept index into segments, so a run can reuse some of them and write others.

Segments end between input files: a changed file does not affect the segments before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchinfer.input.input_file import InputFile
from batchinfer.store.kept.facts import SegmentFacts
from batchinfer.store.kept.files import KeptSegment

_OF_A_RUN = 16  # maximum segments that a run writes
_BYTES = 8 << 20  # minimum input bytes per segment
# Maximum segments of a kept index. With one small new file per run, every 24th run merges small segments
_MOST = 24


class SegmentBoundaries:
    """Decides which input files of a run begin a new segment of the kept index.

    Segments have similar sizes.
    """

    def __init__(self, size: int) -> None:
        """Choose the size of segments for input files with this total size in bytes."""
        self._least = max(_BYTES, size // _OF_A_RUN)
        self._held = 0

    def is_before(self, size: int) -> bool:
        """Return True if the next input file, with this size in bytes, begins a new segment.

        Call it for each file.
        """
        is_boundary = self._held >= self._least
        self._held = size if is_boundary else self._held + size
        return is_boundary


def count_unchanged(
    segments: Sequence[KeptSegment], facts: Sequence[SegmentFacts], files: Sequence[InputFile]
) -> int:
    """Return the number of leading segments of the kept index whose input files are unchanged.

    The input of this run must begin with these files in the same order.

    Args:
        segments: The segments that an earlier run kept.
        facts: The totals of each segment. Only the number of input files is used.
        files: The input files of this run, in order.
    """
    at = 0
    for number, (segment, known) in enumerate(zip(segments, facts, strict=True)):
        own = [one.file for one in segment.files]
        here = [*files[at : at + len(own)]]
        if len(own) < known.files or own != here or not all(file.inode for file in here):
            return number
        at += len(own)
    return len(segments)


def count_reused(sizes: Sequence[int], rest: int) -> int:
    """Return how many of the unchanged leading segments of the kept index a run reuses.

    All are reused unless there are too many segments. Then the last ones are merged: the run reads their
    files again, together with the new files.

    Args:
        sizes: The input bytes of each unchanged segment.
        rest: The input bytes of the files after the unchanged segments.
    """
    taken = len(sizes)
    if taken < _MOST:
        return taken
    while taken and (taken >= _MOST or sizes[taken - 1] <= 2 * rest):
        taken -= 1
        rest += sizes[taken]
    return taken
