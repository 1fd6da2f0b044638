"""Builds the drafter from the names of its draft sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial

from batchinfer.core.samples import DraftSourceName
from batchinfer.engine.drafts.draft_model import DraftModelRunner, DraftModelSource
from batchinfer.engine.drafts.drafter import CostedDrafter
from batchinfer.engine.drafts.given_answer import GivenAnswer
from batchinfer.engine.drafts.medusa import MedusaRunner, MedusaSource
from batchinfer.engine.drafts.model_choice import ModelChoice
from batchinfer.engine.drafts.other_answers import OtherAnswers
from batchinfer.engine.drafts.own_text import OwnText
from batchinfer.engine.drafts.source import DraftingModel, DraftSource
from batchinfer.engine.drafts.step_times import DraftedStepTimes
from batchinfer.engine.runner.runner import Runner
from batchinfer.engine.tensors.graph_sizes import MIN_SAMPLED_ROWS, GraphSteps
from batchinfer_kernels.cost import Peaks

# In the order in which they are queried: the most specific to a row first
_SOURCES: Mapping[DraftSourceName, Callable[[], DraftSource]] = {
    "earlier": partial(GivenAnswer, "earlier"),
    "model": partial(GivenAnswer, "model"),
    "prompt": OwnText,
    "answers": OtherAnswers,
}


def make_drafter(
    names: Seq[DraftSourceName],
    runner: Runner,
    peaks: Peaks | None,
    max_num_seqs: int,
    draft_runner: DraftModelRunner | MedusaRunner | None = None,
    graphs: GraphSteps | None = None,
) -> CostedDrafter | None:
    """Create the drafter of an engine: the object that chooses the drafts of each step from the draft sources.

    A step with drafts samples at most `max_num_seqs` positions on a GPU and twice this number on a CPU. The limit is
    at least 64.

    Args:
        names: The names of the draft sources.
        runner: The runner of the target model.
        peaks: The peak FLOP/s and bandwidth of the device, or None if unknown.
        max_num_seqs: The maximum number of running sequences.
        draft_runner: The draft model or the draft heads. None: the job has neither.
        graphs: The sizes of steps that are replayed as one CUDA graph. None: no step is.

    Returns:
        The drafter. None if no source is named or `peaks` is None.
    """
    if not names or peaks is None:
        return None
    times = DraftedStepTimes(runner.cost, peaks, graphs)
    most = max(MIN_SAMPLED_ROWS, max_num_seqs if runner.looks_ahead else 2 * max_num_seqs)
    sources = [make() for name, make in _SOURCES.items() if name in names]
    model: DraftingModel | None = None
    if isinstance(draft_runner, MedusaRunner):
        model = MedusaSource(draft_runner, peaks)
    elif draft_runner is not None:
        model = DraftModelSource(draft_runner, peaks)
    return CostedDrafter(
        sources,
        times,
        most,
        runner.looks_ahead,
        model=None if model is None else ModelChoice(model),
        most_drafts=None if graphs is None else graphs.most_drafts,
    )
