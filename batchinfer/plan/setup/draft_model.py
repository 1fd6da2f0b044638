"""The model whose tokens are drafts of a job's: smaller than the job's own, with the same tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchinfer.core.errors import JobFileError
from batchinfer.data.storage.state import StateFolder
from batchinfer.data.tokenizer.tokenizer import Tokenizer
from batchinfer.engine.config import BesideConfig
from batchinfer.job import Job
from batchinfer.job.spec import DraftModelSection
from batchinfer.machine.hardware import Hardware
from batchinfer.models.opening import StoredModel, open_checkpoint
from batchinfer.plan.setup.draft_place import DraftPlace, PlacedModel, cannot_be_beside, draft_place
from batchinfer.plan.setup.job_weights import job_weights
from batchinfer.plan.setup.resolve import Setting, resolve

_WHERE = "drafts.model"


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model found right. `job` is the job as this model runs it where it answers first."""

    job: Job
    checkpoint: StoredModel
    setting: Setting
    tokenizer: Tokenizer
    place: DraftPlace

    @property
    def config(self) -> BesideConfig:
        """Return how an engine loads it beside its own model."""
        setting, path = self.setting, self.job.model.path
        return BesideConfig(path, setting.dtype, setting.quantization, setting.kv_cache)


def draft_model(
    job: Job,
    own: PlacedModel,
    tokenizer: Tokenizer,
    state: StateFolder,
    hardware: Hardware | None = None,
) -> DraftModel | None:
    """Return the draft model that a job names, if it names one. `own` is the job's own model, and `tokenizer` that
    one's; `hardware`: a machine other than this one. Raises JobFileError, SecurityRefusal and Unavailable."""
    drafting, section = job.drafting_job, job.drafts
    if drafting is None or not isinstance(section, DraftModelSection):
        return None
    try:
        checkpoint = open_checkpoint(drafting.model.path)
        weights = job_weights(drafting, checkpoint, resolve(drafting, checkpoint, hardware), state)
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
