"""Ways to split prompts into steps. None may change an answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from batchinfer.engine.runner.micro_batches import MicroBatches
from batchinfer.engine.schedule.scheduler import Scheduler, Step
from tests.batchinfer.engine.small_engine import (
    MIXED,
    Checkpoint,
    Limits,
    checkpoint,
    cpu_ops,
    looking_ahead,
    make_runner,
)


@dataclass(frozen=True)
class PromptSplit:
    """A way to split prompts.

    Attributes:
        most: tokens per micro-batch, with look-ahead.
        windows: if True, some layers have windows.
    """

    limits: Limits
    ahead: bool
    most: int | None
    windows: bool

    @property
    def family(self) -> str:
        return "qwen2" if self.windows else "llama"

    @property
    def options(self) -> dict[str, Any]:
        return MIXED if self.windows else {}

    @property
    def model(self) -> Checkpoint:
        return checkpoint(self.family, **self.options)

    def runner(self) -> Any:
        """Return a runner of the model, with or without look-ahead."""
        runner = make_runner(self.model, cpu_ops(self.model), self.limits)
        if not self.ahead:
            return runner
        return replace(looking_ahead(runner), micro_batches=MicroBatches(self.most))


@st.composite
def prompt_splits(draw: Any, caching: st.SearchStrategy[bool] = st.booleans()) -> PromptSplit:  # noqa: B008 - it is never changed
    windows = draw(st.booleans())
    blocks = draw(st.integers(30, 60)) * (3 if windows else 1)
    budget, seqs = draw(st.sampled_from([1, 5, 16, 64])), draw(st.integers(1, 5))
    limits = Limits(budget, seqs, draw(caching), blocks, 4, draw(st.booleans()))
    return PromptSplit(limits, draw(st.booleans()), draw(st.sampled_from([None, 3])), windows)


class PreemptingOnce(Scheduler):
    """Preempts each sequence once, in the middle of its prompt."""

    def schedule(self, drafted: bool = False) -> Step:
        chosen = [one for one in self.running if one.computed > 20 and not one.preemptions]
        for sequence in chosen:
            del self.running[sequence]
            self._preempt(sequence)
        step = super().schedule(drafted)
        step.preemptions += len(chosen)
        return step
