"""Opens the draft model or draft heads of a job, and decides where a draft model runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from batchinfer.core.errors import JobFileError
from batchinfer.engine.config import DEFAULT_BLOCK_SIZE, DEFAULT_MAX_NUM_SEQS, DraftModelConfig
from batchinfer.engine.drafts.draft_model import spare_blocks
from batchinfer.engine.drafts.draft_value import expected_accepted
from batchinfer.engine.kv.memory import CPU_FRACTION
from batchinfer.filesystem.state import StateFolder
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.job import Job
from batchinfer.job.spec import DraftModelSection
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.heads.inspection import inspect_heads
from batchinfer.models.heads.stored_heads import WHERE, StoredHeads, StoredLayer
from batchinfer.models.opening import StoredModel, open_checkpoint
from batchinfer.plan.setup.resolve import resolve
from batchinfer.plan.setup.setting import PlacedModel, Setting
from batchinfer.plan.setup.weights import job_weights
from batchinfer_kernels.cost import StepShape, roofline_seconds

# Assumed probability that a draft token is accepted after accepted ones, until it is measured. Answers made in
# advance (FIRST) diverge from the target model's answer sooner or later.
BESIDE_RIGHT, FIRST_RIGHT = 0.75, 0.6
_CONTEXT_TOKENS = 512
_MOST_DRAFTS = 16  # draft tokens per row
_WHERE = "drafts.model"


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A validated draft model. `job` is the job with this model, for the case that it answers all rows first."""

    job: Job
    checkpoint: StoredModel
    setting: Setting
    tokenizer: Tokenizer
    place: DraftPlace

    @property
    def config(self) -> DraftModelConfig:
        """Return how an engine loads the draft model next to its own model."""
        numerics = self.setting.numerics
        return DraftModelConfig(self.job.model.path, numerics.dtype, numerics.quantization, numerics.kv_cache)


def draft_model(job: Job, own: PlacedModel, tokenizer: Tokenizer, state: StateFolder) -> DraftModel | None:
    """Return the draft model that a job names, or None. Raises JobFileError, SecurityRefusal or Unavailable.

    `own` and `tokenizer` belong to the job's own model.
    """
    drafting, section = job.drafting_job, job.drafts
    if drafting is None or not isinstance(section, DraftModelSection):
        return None
    try:
        checkpoint = open_checkpoint(drafting.model.path)
        setting = resolve(drafting, checkpoint, own.setting.placement.machine)
        weights = job_weights(drafting, checkpoint, setting, state)
        other = Tokenizer.load(drafting.model.path)
    except JobFileError as error:
        wrong = [replace(one, where=_WHERE) if one.where == "model.path" else one for one in error.mistakes]
        with job.located():
            raise JobFileError(str(job.source), wrong) from error
    if _tokens(other) != _tokens(tokenizer):
        raise job.mistake(
            _WHERE,
            f"{drafting.model.path} has other tokens than the job's model: its answers could be no drafts; name a "
            "model with the same tokenizer, such as a smaller one of the same family",
        )
    found = PlacedModel(weights.checkpoint, weights.setting)
    return DraftModel(drafting, *found, other, _place(job, section, own, found))


def _place(job: Job, section: DraftModelSection, own: PlacedModel, found: PlacedModel) -> DraftPlace:
    if section.runs == "auto":
        return draft_place(job, own, found)
    refused = cannot_be_beside(own, found) if section.runs == "beside" else None
    if refused is not None:
        raise job.mistake("drafts.runs", f"beside: {refused}; use first, or leave it out")
    return DraftPlace(section.runs == "beside", "the job says so")


def _tokens(tokenizer: Tokenizer) -> dict[str, int]:
    found: dict[str, int] = tokenizer.rust.get_vocab(with_added_tokens=True)
    return found


class DraftPlace(NamedTuple):
    """Where a draft model runs, and why."""

    beside: bool
    why: str

    @property
    def facts(self) -> dict[str, str]:
        """Return the place and the reason as a dictionary for forecasts."""
        return {"runs": "beside" if self.beside else "first", "why": self.why}


def cannot_be_beside(own: PlacedModel, draft: PlacedModel) -> str | None:
    """Return why one engine cannot have both models, whatever its memory, or None if it can."""
    if own.setting.placement.division.ranks > 1:
        return "the job's model is divided among ranks, which run the same steps"
    if not (isinstance(own.checkpoint, Checkpoint) and isinstance(draft.checkpoint, Checkpoint)):
        return "transformers' code computes one of the models, and keeps its cache itself"
    if all(window is not None for window in own.checkpoint.spec.windows):
        return "every layer of the job's model has a window, whose blocks are given up"
    return None


def draft_place(job: Job, own: PlacedModel, draft: PlacedModel) -> DraftPlace:
    """Choose where the draft model runs: before the job's model, or in the same engine."""
    refused = cannot_be_beside(own, draft)
    if refused is not None:
        return DraftPlace(False, refused)
    if own.setting.device == "cuda":
        return DraftPlace(False, "no draft model has run beside another one on a GPU yet")
    if not _fit(job, own, draft):
        return DraftPlace(False, "both models and the longest row do not fit into memory together")
    if own.setting.peaks is None or draft.setting.peaks is None:
        return DraftPlace(False, "this machine's peaks are not known, by which beside pays where")
    rows = _rows(job, own.setting)
    first = _seconds(draft, rows, 0) / rows + _least(own, rows, FIRST_RIGHT, lambda drafts: 0.0)
    beside = _least(own, rows, BESIDE_RIGHT, lambda drafts: drafts * _seconds(draft, rows, 0))
    which = (
        f"{1e3 * beside:.3g} ms a token expected beside it, {1e3 * first:.3g} ms with answers that come first"
    )
    return DraftPlace(beside <= first, which)


def _seconds(model: PlacedModel, rows: int, drafts: int) -> float:
    """Return the roofline seconds of a step with this number of rows and draft tokens per row."""
    assert model.setting.peaks is not None
    tokens, layers = rows * (1 + drafts), len(model.cost.windows)
    shape = StepShape(tokens, tokens, tokens * _CONTEXT_TOKENS * layers, rows * _CONTEXT_TOKENS * layers)
    return roofline_seconds(model.cost.step(shape), model.setting.peaks)


def _rows(job: Job, setting: Setting) -> int:
    asked = job.engine.max_num_seqs
    return DEFAULT_MAX_NUM_SEQS[setting.device] if asked == "auto" else asked


def _least(own: PlacedModel, rows: int, right: float, extra_s: Callable[[int], float]) -> float:
    """Return the least seconds per token of the job's model with the best number of draft tokens.

    `extra_s` returns the seconds to make a number of draft tokens.
    """
    each = (
        (_seconds(own, rows, n) + extra_s(n)) / (1 + (expected_accepted(right, n) if n else 0))
        for n in range(_MOST_DRAFTS + 1)
    )
    return min(each) / rows


def _fit(job: Job, own: PlacedModel, draft: PlacedModel) -> bool:
    """Return True if memory suffices for both models and the longest possible row."""
    numerics, placement, asked = own.setting.numerics, own.setting.placement, job.engine.kv_memory
    size = DEFAULT_BLOCK_SIZE if numerics.block_size == "auto" else numerics.block_size
    spare = size * spare_blocks(size, _rows(job, own.setting))
    needed = own.cost.kv_bytes(numerics.max_model_len) + draft.cost.kv_bytes(numerics.max_model_len + spare)
    left = placement.free_memory // placement.replicas - own.weight_bytes - draft.weight_bytes
    if isinstance(asked, int):
        return needed <= asked // placement.replicas and asked // placement.replicas <= left
    return needed <= left * (CPU_FRACTION if asked == "auto" else asked)


def draft_heads(job: Job, checkpoint: StoredModel, setting: Setting) -> StoredHeads | None:
    """Return the draft heads that a job names, or None. Raises JobFileError or SecurityRefusal."""
    section = job.drafts
    if not isinstance(section, DraftModelSection) or section.heads is None:
        return None
    if not isinstance(checkpoint, Checkpoint):
        raise job.mistake(
            WHERE, "transformers' code computes the job's model, whose hidden states are not kept"
        )
    if setting.placement.division.ranks > 1:
        raise job.mistake(WHERE, "a model that is divided among ranks has no heads; remove them")
    try:
        heads = inspect_heads(section.heads, checkpoint)
    except JobFileError as error:
        wrong = [replace(one, where=WHERE) for one in error.mistakes]
        with job.located():
            raise JobFileError(str(job.source), wrong) from error
    if isinstance(heads, StoredLayer) and all(window is not None for window in checkpoint.spec.windows):
        raise job.mistake(WHERE, "every layer of the job's model has a window, whose blocks are given up")
    return heads
