"""The account of a rank: its part of a model, and what that takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batchinfer.core.samples import ExpertTokens, RankUse
from batchinfer.machine.memory import peak_memory
from batchinfer.models.parallel.group import SpentTime


@dataclass(frozen=True, slots=True)
class RankAccount:
    """The account says what a rank of an engine has, and counts what it takes while it works."""

    rank: int
    stage: int
    weight_bytes: int
    kv_bytes: int
    read_bytes: int
    before_bytes: int | None  # that the process had in memory before it loaded anything; None: not known
    wait: SpentTime | None = None  # for ranks of other stages; None: there are no stages
    sums: SpentTime | None = None  # see `Company`
    # how many tokens all experts of its layers were given so far; waits for the device
    read_loads: Callable[[], ExpertTokens] = dict

    def use(self, waited_s: float = 0.0) -> RankUse:
        """Return what it came to. waited_s: for which the rank has waited for steps."""
        return RankUse(
            rank=self.rank,
            stage=self.stage,
            weight_bytes=self.weight_bytes,
            kv_bytes=self.kv_bytes,
            read_bytes=self.read_bytes,
            before_rss_bytes=self.before_bytes,
            peak_rss_bytes=peak_memory(),
            collective_s=None if self.sums is None else self.sums.seconds,
            stage_wait_s=None if self.wait is None else waited_s + self.wait.seconds,
        )
