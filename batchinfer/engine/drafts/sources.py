"""The sources that jobs can name, and the drafter that asks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial

from batchinfer.core.samples import DraftName
from batchinfer.engine.drafts.drafter import CostedDrafter
from batchinfer.engine.drafts.given_answer import GivenAnswer
from batchinfer.engine.drafts.medusa import HeadsBeside, HeadsRunner
from batchinfer.engine.drafts.model_beside import BesideRunner, ModelBeside
from batchinfer.engine.drafts.model_choice import ModelChoice
from batchinfer.engine.drafts.other_answers import OtherAnswers
from batchinfer.engine.drafts.own_text import OwnText
from batchinfer.engine.drafts.source import DraftingModel, DraftSource
from batchinfer.engine.drafts.step_times import DraftedStepTimes
from batchinfer.engine.runner.runner import Runner
from batchinfer.engine.tensors.graph_sizes import MIN_SAMPLED_ROWS, GraphSteps
from batchinfer_kernels.cost import Peaks

# What knows most of a row comes first
_SOURCES: Mapping[DraftName, Callable[[], DraftSource]] = {
    "earlier": partial(GivenAnswer, "earlier"),
    "model": partial(GivenAnswer, "model"),
    "prompt": OwnText,
    "answers": OtherAnswers,
}


def drafter_of(
    names: Seq[DraftName],
    runner: Runner,
    peaks: Peaks | None,
    max_num_seqs: int,
    beside: BesideRunner | HeadsRunner | None = None,
    graphs: GraphSteps | None = None,
) -> CostedDrafter | None:
    """Make a drafter of the sources of these names, and of the model or the heads `beside` the engine's model, if there
    are any; None where there are none, or nobody knows what steps cost.

    A GPU's memory is shared out for logits of `max_num_seqs` rows; on a CPU steps with drafts may have twice as many.
    `graphs`: the steps that are replayed as a whole, if any are.
    """
    if not names or peaks is None:
        return None
    times = DraftedStepTimes(runner.cost, peaks, graphs)
    most = max(MIN_SAMPLED_ROWS, max_num_seqs if runner.looks_ahead else 2 * max_num_seqs)
    sources = [make() for name, make in _SOURCES.items() if name in names]
    model: DraftingModel | None = None
    if beside is not None:
        model = HeadsBeside(beside, peaks) if isinstance(beside, HeadsRunner) else ModelBeside(beside, peaks)
    return CostedDrafter(
        sources,
        times,
        most,
        runner.looks_ahead,
        model=None if model is None else ModelChoice(model),
        most_drafts=None if graphs is None else graphs.most_drafts,
    )
