"""A kept index is made of stretches: a run may take over some of them, and writes others.

They are cut at the ends of input files, so that a changed file leaves those before it as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchinfer.input.input_file import InputFile
from batchinfer.store.kept.facts import StretchFacts
from batchinfer.store.kept.files import KeptStretch

_OF_A_RUN = 16  # stretches that a run writes at most
_BYTES = 8 << 20  # of input that a stretch has at least
_MOST = 24  # that are kept: as many nights as add a small file are cheap, and one of them puts such files together


class StretchCuts:
    """Says before which input files of a run another stretch begins."""

    def __init__(self, size: int) -> None:
        """size: of all files."""
        self._least = max(_BYTES, size // _OF_A_RUN)
        self._held = 0

    def before(self, size: int) -> bool:
        """Whether a stretch begins with the next file, which has this size."""
        cuts = self._held >= self._least
        self._held = size if cuts else self._held + size
        return cuts


def unchanged_stretches(
    stretches: Sequence[KeptStretch], facts: Sequence[StretchFacts], files: Sequence[InputFile]
) -> int:
    """Return of how many stretches, from the first one on, the files are the first of these, and none has changed."""
    at = 0
    for number, (stretch, known) in enumerate(zip(stretches, facts, strict=True)):
        own = [one.file for one in stretch.files]
        here = [*files[at : at + len(own)]]
        if len(own) < known.files or own != here or not all(file.inode for file in here):
            return number
        at += len(own)
    return len(stretches)


def worth_taking(sizes: Sequence[int], rest: int) -> int:
    """Return how many of the stretches with these sizes are taken over, where `rest` bytes are behind them. Where they
    become too many, the last ones join the rows behind them, as far as these are not much more."""
    taken = len(sizes)
    if taken < _MOST:
        return taken
    while taken and (taken >= _MOST or sizes[taken - 1] <= 2 * rest):
        taken -= 1
        rest += sizes[taken]
    return taken
