"""The adapters of a job, checked against its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from batchinfer.data.storage.remembered import read_strings
from batchinfer.data.storage.state import StateFolder
from batchinfer.job import Job
from batchinfer.models.adapters.sizes import AdapterSizes, sizes_of
from batchinfer.models.adapters.stored_adapter import StoredAdapter, inspect_adapter
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.opening import StoredModel
from batchinfer.plan.setup.resolve import Setting


@dataclass(frozen=True, slots=True)
class JobAdapters:
    """The adapters of a job: fingerprints by their names, and what those beside the weights take; `merged`: whether it
    is one that is merged into the weights."""

    fingerprints: dict[str, str]
    sizes: AdapterSizes | None = None
    merged: bool = False


def job_adapters(job: Job, checkpoint: StoredModel, state: StateFolder) -> JobAdapters:
    """Return the job's adapters; files that the state does not know are hashed.

    Raises JobFileError and SecurityRefusal for adapters that cannot be computed, with the reason.
    """
    if not job.model.adapters:
        return JobAdapters({})
    if not isinstance(checkpoint, Checkpoint):
        text = f"{checkpoint.spec.family} is computed by transformers' code, which is given no adapters"
        raise job.mistake("model.adapters", f"{text}; merge them into the model (PEFT: merge_and_unload)")
    known = read_strings(state.fingerprints)
    found = {name: inspect_adapter(name, path, checkpoint) for name, path in job.model.adapters.items()}
    _check_merged(job, found)
    fingerprints = {name: adapter.fingerprint(known) for name, adapter in found.items()}
    different = {fingerprints[name]: adapter for name, adapter in found.items()}
    merged = any(adapter.config.dora for adapter in found.values())
    return JobAdapters(fingerprints, sizes_of(checkpoint.spec, [*different.values()]), merged)


def _check_merged(job: Job, found: Mapping[str, StoredAdapter]) -> None:
    """Refuse a DoRA that other rows would get, too."""
    dora = next((name for name, adapter in found.items() if adapter.config.dora), None)
    if dora is None or (len(found) == 1 and job.model.adapter == dora):
        return
    text = (
        "is a DoRA, which rescales the rows of the model's weights, and is merged into them: it must be the only "
        f"adapter, and that of all rows; set model.adapter: {dora}, or merge it with PEFT (merge_and_unload)"
    )
    raise job.mistake(f"model.adapters.{dora}", text)


def with_adapters(setting: Setting, job: Job, adapters: JobAdapters) -> Setting:
    """Return the setting with the folders of the adapters: of equal ones the first."""
    folders = {adapters.fingerprints[name]: path for name, path in reversed(job.model.adapters.items())}
    if not folders:
        return setting
    return replace(setting, adapters=tuple(folders.items()), adapter_sizes=adapters.sizes)
