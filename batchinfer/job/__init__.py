"""Reads a job file and returns a frozen Job, or reports all mistakes at once."""

from batchinfer.job.prompt import PromptSection
from batchinfer.job.sampling import SamplingSection
from batchinfer.job.spec import (
    CacheSection,
    EngineSection,
    InputSection,
    Job,
    ModelSection,
    OutputSection,
    job_schema,
    load_job,
)
from batchinfer.job.template import init_files, init_text

__all__ = [
    "CacheSection",
    "EngineSection",
    "InputSection",
    "Job",
    "ModelSection",
    "OutputSection",
    "PromptSection",
    "SamplingSection",
    "init_files",
    "init_text",
    "job_schema",
    "load_job",
]
