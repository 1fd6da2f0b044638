"""A kept index is made of segments: a run may take over some of them, and writes others.

They are cut at the ends of input files, so that a changed file leaves those before it as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchinfer.input.input_file import InputFile
from batchinfer.store.kept.facts import SegmentFacts
from batchinfer.store.kept.files import KeptSegment

_OF_A_RUN = 16  # segments that a run writes at most
_BYTES = 8 << 20  # of input that a segment has at least
_MOST = 24  # that are kept: as many nights as add a small file are cheap, and one of them puts such files together


class SegmentCuts:
    """Says before which input files of a run another segment begins."""

    def __init__(self, size: int) -> None:
        """size: of all files."""
        self._least = max(_BYTES, size // _OF_A_RUN)
        self._held = 0

    def before(self, size: int) -> bool:
        """Whether a segment begins with the next file, which has this size."""
        cuts = self._held >= self._least
        self._held = size if cuts else self._held + size
        return cuts


def count_unchanged(
    segments: Sequence[KeptSegment], facts: Sequence[SegmentFacts], files: Sequence[InputFile]
) -> int:
    """Return of how many segments, from the first one on, the files are the first of these, and none has changed."""
    at = 0
    for number, (segment, known) in enumerate(zip(segments, facts, strict=True)):
        own = [one.file for one in segment.files]
        here = [*files[at : at + len(own)]]
        if len(own) < known.files or own != here or not all(file.inode for file in here):
            return number
        at += len(own)
    return len(segments)


def count_reused(sizes: Sequence[int], rest: int) -> int:
    """Return how many of the segments with these sizes are taken over, where `rest` bytes are behind them. Where they
    become too many, the last ones join the rows behind them, as far as these are not much more."""
    taken = len(sizes)
    if taken < _MOST:
        return taken
    while taken and (taken >= _MOST or sizes[taken - 1] <= 2 * rest):
        taken -= 1
        rest += sizes[taken]
    return taken
