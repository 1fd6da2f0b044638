"""The borders of a stage: the ranks that have the layers before and behind it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from batchinfer.models.parallel.group import Group, SpentTime


@dataclass(frozen=True, slots=True, eq=False)
class StageBorders:
    """The ranks before and behind one; None: there are none. What comes lies in `states`, (most tokens, hidden), where
    it stays until the next step: captured layers read it there. All steps of a rank, whichever of the engines that take
    turns they are of, run one after the other, and have it in common."""

    group: Group
    before: int | None
    behind: int | None
    states: Tensor
    wait: SpentTime  # of the host, on a CPU; a GPU's does not wait

    @property
    def begins(self) -> bool:
        """Whether no stage is before it."""
        return self.before is None

    @property
    def ends(self) -> bool:
        """Whether no stage is behind it."""
        return self.behind is None

    def receive(self, tokens: int) -> None:
        """Fill the first rows of `states`."""
        if self.before is not None:
            with self.wait.spending():
                self.group.receive(self.states[:tokens], self.before)

    def hand_on(self, hidden: Tensor) -> None:
        """Send these rows to the stage behind."""
        if self.behind is not None:
            with self.wait.spending():
                self.group.send(hidden, self.behind)
