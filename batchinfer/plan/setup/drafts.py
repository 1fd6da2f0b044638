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

# Assumed probability that a draft token is accepted after accepted ones, until it is measured. Answers that the draft
# model makes in advance (FIRST) diverge from the target model's answer sooner or later.
IN_ENGINE_ACCEPTANCE, FIRST_ACCEPTANCE = 0.75, 0.6
_CONTEXT_TOKENS = 512
_MOST_DRAFTS = 16  # draft tokens per row
_WHERE = "drafts.model"


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model that has passed all checks.

    Attributes:
        job: A copy of the job in which the draft model replaces the job's model. If the draft model answers all rows
            first, this copy runs before the job itself.
        checkpoint: The checkpoint of the draft model.
        setting: Device, arithmetic, memory and parallelism of the draft model.
        tokenizer: The tokenizer of the draft model.
        place: Where the draft model runs.
    """

    job: Job
    checkpoint: StoredModel
    setting: Setting
    tokenizer: Tokenizer
    place: DraftPlace

    @property
    def config(self) -> DraftModelConfig:
        """Return the configuration with which an engine loads the draft model next to the job's model."""
        numerics = self.setting.numerics
        return DraftModelConfig(self.job.model.path, numerics.dtype, numerics.quantization, numerics.kv_cache)


def open_draft_model(
    job: Job, own: PlacedModel, tokenizer: Tokenizer, state: StateFolder
) -> DraftModel | None:
    """Open and check the draft model that a job names. Returns None if it names none.

    Args:
        job: The job.
        own: The job's own model.
        tokenizer: The tokenizer of the job's own model. The draft model must have the same tokens.
        state: The job's state folder, which stores digests of files and calibrated weights.

    Raises:
        JobFileError: The draft model is unsupported or unsuitable.
        SecurityRefusal: A file is not safe to load.
        Unavailable: The draft model cannot run on this machine.
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
        return choose_draft_place(job, own, found)
    refused = why_not_in_engine(own, found) if section.runs == "beside" else None
    if refused is not None:
        raise job.mistake("drafts.runs", f"beside: {refused}; use first, or leave it out")
    return DraftPlace(section.runs == "beside", "the job says so")


def _tokens(tokenizer: Tokenizer) -> dict[str, int]:
    found: dict[str, int] = tokenizer.rust.get_vocab(with_added_tokens=True)
    return found


class DraftPlace(NamedTuple):
    """Where a draft model runs, and why.

    Attributes:
        in_engine: True: in the engines of the job's model. False: it answers all rows before the job's model is
            loaded.
        why: The reason, for people.
    """

    in_engine: bool
    why: str

    @property
    def facts(self) -> dict[str, str]:
        """Return the place and the reason as a dictionary for forecasts.

        `runs` is "beside" for a draft model in the engines of the job's model, else "first". `why` is the reason.
        """
        return {"runs": "beside" if self.in_engine else "first", "why": self.why}


def why_not_in_engine(own: PlacedModel, draft: PlacedModel) -> str | None:
    """Return why the job's model and the draft model cannot run in the same engine, or None if they can.

    Memory is not checked.

    Args:
        own: The job's model.
        draft: The draft model.
    """
    if own.setting.placement.division.ranks > 1:
        return "the job's model is sharded among ranks, which must all run the same steps"
    if not (isinstance(own.checkpoint, Checkpoint) and isinstance(draft.checkpoint, Checkpoint)):
        return "transformers' code computes one of the models, and keeps its cache itself"
    if all(window is not None for window in own.checkpoint.spec.windows):
        return "every layer of the job's model has a window, whose blocks are given up"
    return None


def choose_draft_place(job: Job, own: PlacedModel, draft: PlacedModel) -> DraftPlace:
    """Choose where the draft model runs: before the job's model, or in its engines.

    Of the possible places, the one with the shorter forecast time per token is chosen.

    Args:
        job: The job.
        own: The job's model.
        draft: The draft model.
    """
    refused = why_not_in_engine(own, draft)
    if refused is not None:
        return DraftPlace(False, refused)
    if own.setting.device == "cuda":
        return DraftPlace(False, "no draft model has run in the engine of another model on a GPU yet")
    if not _fit(job, own, draft):
        return DraftPlace(False, "both models and the longest row do not fit into memory together")
    if own.setting.peaks is None or draft.setting.peaks is None:
        return DraftPlace(False, "which is faster is unknown, because this machine's peaks are unknown")
    rows = _rows(job, own.setting)
    first = _seconds(draft, rows, 0) / rows + _least(own, rows, FIRST_ACCEPTANCE, lambda drafts: 0.0)
    in_engine = _least(own, rows, IN_ENGINE_ACCEPTANCE, lambda drafts: drafts * _seconds(draft, rows, 0))
    which = f"forecast {1e3 * in_engine:.3g} ms per token in the same engine, {1e3 * first:.3g} ms if it answers first"
    return DraftPlace(in_engine <= first, which)


def _seconds(model: PlacedModel, rows: int, drafts: int) -> float:
    assert model.setting.peaks is not None
    tokens, layers = rows * (1 + drafts), len(model.cost.windows)
    shape = StepShape(tokens, tokens, tokens * _CONTEXT_TOKENS * layers, rows * _CONTEXT_TOKENS * layers)
    return roofline_seconds(model.cost.step(shape), model.setting.peaks)


def _rows(job: Job, setting: Setting) -> int:
    asked = job.engine.max_num_seqs
    return DEFAULT_MAX_NUM_SEQS[setting.device] if asked == "auto" else asked


def _least(own: PlacedModel, rows: int, acceptance: float, extra_s: Callable[[int], float]) -> float:
    # Seconds per output token with the best number of draft tokens per row. `extra_s` returns the time to propose
    # them.
    each = (
        (_seconds(own, rows, n) + extra_s(n)) / (1 + (expected_accepted(acceptance, n) if n else 0))
        for n in range(_MOST_DRAFTS + 1)
    )
    return min(each) / rows


def _fit(job: Job, own: PlacedModel, draft: PlacedModel) -> bool:
    numerics, placement, asked = own.setting.numerics, own.setting.placement, job.engine.kv_memory
    size = DEFAULT_BLOCK_SIZE if numerics.block_size == "auto" else numerics.block_size
    spare = size * spare_blocks(size, _rows(job, own.setting))
    needed = own.cost.kv_bytes(numerics.max_model_len) + draft.cost.kv_bytes(numerics.max_model_len + spare)
    left = placement.free_memory // placement.replicas - own.weight_bytes - draft.weight_bytes
    if isinstance(asked, int):
        return needed <= asked // placement.replicas and asked // placement.replicas <= left
    return needed <= left * (CPU_FRACTION if asked == "auto" else asked)


def open_draft_heads(job: Job, checkpoint: StoredModel, setting: Setting) -> StoredHeads | None:
    """Open and check the draft heads that a job names. Returns None if it names none.

    Args:
        job: The job.
        checkpoint: The job's model.
        setting: Device, arithmetic, memory and parallelism of the job's model.

    Raises:
        JobFileError: The heads are unsupported, or do not belong to the model.
        SecurityRefusal: A file is not safe to load.
    """
    section = job.drafts
    if not isinstance(section, DraftModelSection) or section.heads is None:
        return None
    if not isinstance(checkpoint, Checkpoint):
        raise job.mistake(
            WHERE, "transformers' code computes the job's model, whose hidden states are not kept"
        )
    if setting.placement.division.ranks > 1:
        raise job.mistake(
            WHERE, "draft heads do not work with a model that is sharded among ranks; remove them"
        )
    try:
        heads = inspect_heads(section.heads, checkpoint)
    except JobFileError as error:
        wrong = [replace(one, where=WHERE) for one in error.mistakes]
        with job.located():
            raise JobFileError(str(job.source), wrong) from error
    if isinstance(heads, StoredLayer) and all(window is not None for window in checkpoint.spec.windows):
        raise job.mistake(WHERE, "every layer of the job's model has a window, whose blocks are given up")
    return heads
