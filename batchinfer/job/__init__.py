"""job.yaml → a frozen Job, or every mistake at once."""

from batchinfer.job.spec import (
    CacheSpec,
    EngineSpec,
    InputSpec,
    Job,
    ModelSpec,
    OutputSpec,
    PromptSpec,
    SamplingSpec,
    job_schema,
    load_job,
)
from batchinfer.job.template import init_files, init_text

__all__ = [
    "CacheSpec",
    "EngineSpec",
    "InputSpec",
    "Job",
    "ModelSpec",
    "OutputSpec",
    "PromptSpec",
    "SamplingSpec",
    "init_files",
    "init_text",
    "job_schema",
    "load_job",
]
