"""A step that the stages before have begun to run, and that is run here when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from batchinfer.core.request import TokenLogprobs
from batchinfer.engine.runner.runner import Launched, StepLaunch
from batchinfer.engine.schedule.step_plan import States, TokenScores


class PendingStep:
    """Waits to be asked: meanwhile this rank does what comes before in other batches."""

    def __init__(self, run: Callable[[], Launched]) -> None:
        self._run = run

    @cached_property
    def _ran(self) -> Launched:
        return self._run()

    @property
    def padded_tokens(self) -> int:
        """Query positions computed only as padding."""
        return self._ran.padded_tokens

    @property
    def launch(self) -> StepLaunch | None:
        """The way in which it was launched."""
        return self._ran.launch

    @property
    def collective_s(self) -> float | None:
        """The seconds that collectives took."""
        return self._ran.collective_s

    def tokens(self) -> list[list[int]]:
        """Run the last stage; the next tokens of each chunk that samples."""
        return self._ran.tokens()

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Return the log-probabilities of each chunk that asks."""
        return self._ran.logprobs()

    def states(self) -> Mapping[int, States]:
        """Return the hidden states that each chunk asks for."""
        return self._ran.states()

    def scores(self) -> TokenScores:
        """Return the log-probabilities of the tokens that the plan names."""
        return self._ran.scores()

    def barred(self) -> Mapping[int, Sequence[bool]]:
        """Return which tokens of chunks that have a mask it gave in the place of the most likely ones."""
        return self._ran.barred()
