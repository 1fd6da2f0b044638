"""Decides whether a draft model answers before the job's model, or proposes beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from batchinfer.engine.config import DEFAULT_BLOCK_SIZE, DEFAULT_MAX_NUM_SEQS
from batchinfer.engine.drafts.model_beside import spare_blocks
from batchinfer.engine.drafts.worth import expected_right
from batchinfer.engine.kv.memory import CPU_FRACTION
from batchinfer.job import Job
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.opening import StoredModel
from batchinfer.models.spec.model_cost import loaded_bytes
from batchinfer.plan.setup.resolve import Setting
from batchinfer_kernels.cost import ModelCost, StepShape, roofline_seconds

# Tokens of a draft that are right where those before them are, as they are believed to be before anything was measured:
# a text that was written without the answer's own words goes another way sooner or later
BESIDE_RIGHT, FIRST_RIGHT = 0.75, 0.6
_CONTEXT = 512  # tokens
_MOST = 16  # drafts of a row


class DraftPlace(NamedTuple):
    """Where a draft model runs, and why there."""

    beside: bool
    why: str

    @property
    def said(self) -> dict[str, str]:
        """Return where it `runs`, and `why`, as `plan` says it."""
        return {"runs": "beside" if self.beside else "first", "why": self.why}


class PlacedModel(NamedTuple):
    """A model and its setting."""

    checkpoint: StoredModel
    setting: Setting

    @property
    def cost(self) -> ModelCost:
        return self.setting.model_cost(self.checkpoint)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of its weights once they are loaded."""
        if not isinstance(self.checkpoint, Checkpoint):
            return self.checkpoint.weight_bytes
        spec = self.checkpoint.spec.quantized(self.setting.quantization)
        return (
            loaded_bytes(spec, self.checkpoint.parameters, self.setting.itemsize) + self.setting.adapter_bytes
        )

    def seconds(self, rows: int, drafts: int) -> float:
        """Return the least seconds of a step of so many rows with so many drafts of each."""
        assert self.setting.peaks is not None
        tokens, layers = rows * (1 + drafts), len(self.cost.windows)
        shape = StepShape(tokens, tokens, tokens * _CONTEXT * layers, rows * _CONTEXT * layers)
        return roofline_seconds(self.cost.step(shape), self.setting.peaks)


def cannot_be_beside(own: PlacedModel, draft: PlacedModel) -> str | None:
    """Return why no engine can have both models at a time, whatever memory there is; None: one can."""
    if own.setting.division.ranks > 1:
        return "the job's model is divided among ranks, which run the same steps"
    if not (isinstance(own.checkpoint, Checkpoint) and isinstance(draft.checkpoint, Checkpoint)):
        return "transformers' code computes one of the models, and keeps its cache itself"
    if all(window is not None for window in own.checkpoint.spec.windows):
        return "every layer of the job's model has a window, whose blocks are given up"
    return None


def draft_place(job: Job, own: PlacedModel, draft: PlacedModel) -> DraftPlace:
    """Choose between a model that answers first and one that proposes beside the job's, where nobody has."""
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
    first = draft.seconds(rows, 0) / rows + _least(own, rows, FIRST_RIGHT, lambda drafts: 0.0)
    beside = _least(own, rows, BESIDE_RIGHT, lambda drafts: drafts * draft.seconds(rows, 0))
    which = (
        f"{1e3 * beside:.3g} ms a token expected beside it, {1e3 * first:.3g} ms with answers that come first"
    )
    return DraftPlace(beside <= first, which)


def _rows(job: Job, setting: Setting) -> int:
    asked = job.engine.max_num_seqs
    return DEFAULT_MAX_NUM_SEQS[setting.device] if asked == "auto" else asked


def _least(own: PlacedModel, rows: int, right: float, extra_s: Callable[[int], float]) -> float:
    """Return the least seconds a token of the job's model, with the best number of drafts, each set of which takes
    `extra_s` more."""
    each = (
        (own.seconds(rows, n) + extra_s(n)) / (1 + (expected_right(right, n) if n else 0))
        for n in range(_MOST + 1)
    )
    return min(each) / rows


def _fit(job: Job, own: PlacedModel, draft: PlacedModel) -> bool:
    """Whether there is memory for both models' weights and the longest row that there may be."""
    setting, asked = own.setting, job.engine.kv_memory
    size = DEFAULT_BLOCK_SIZE if setting.block_size == "auto" else setting.block_size
    spare = size * spare_blocks(size, _rows(job, setting))
    needed = own.cost.kv_bytes(setting.max_model_len) + draft.cost.kv_bytes(setting.max_model_len + spare)
    left = setting.memory() // setting.replicas - own.weight_bytes - draft.weight_bytes
    if isinstance(asked, int):
        return needed <= asked // setting.replicas and asked // setting.replicas <= left
    return needed <= left * (CPU_FRACTION if asked == "auto" else asked)
