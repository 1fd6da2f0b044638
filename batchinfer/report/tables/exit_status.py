"""The values of `exit_status` in the run table."""

from __future__ import annotations

PUBLISHED = "published"
ALREADY_PUBLISHED = "already published"
OVER_BUDGET = "over budget"

# Meanings of the values, for docs/report.md. The values of errors are also in core/errors.py.
MEANINGS = {
    PUBLISHED: "the results are in place",
    ALREADY_PUBLISHED: "nothing was missing: an earlier run published these very results",
    f"{PUBLISHED} {OVER_BUDGET}": "the results are in place, with more error rows than the job allows",
    f"{ALREADY_PUBLISHED} {OVER_BUDGET}": "an earlier run published these results; more error rows than allowed",
    OVER_BUDGET: "more error rows than `on_error.max_error_rate` allows; nothing was published",
    "quality too low": "quantisation changes predictions beyond `engine.quality_limits`; no answer was computed",
    "stopped": "the time of `--stop-at` was reached; the same command continues the job",
    "interrupted": "a signal ended the run; `exit_code` − 128 is its number",
    "input damaged": "an input file is damaged, or changed while it was read",
    "input missing": "an input file is missing, or a pattern matches none",
    "too few rows": "the input has no rows, or fewer than `input.min_rows`; nothing was published",
    "wrong job": "the job file or the checkpoint is wrong",
    "refused": "refused for security",
    "unavailable": "the device cannot be used, or the engine's process ended unexpectedly",
    "out of memory": "on the device or in the machine",
    "output conflict": "the result folder holds something that this job did not write",
    "storage error": "disk full, or another input/output error",
    "locked": "another run of this job is running",
    "usage error": "the command line is wrong",
    "bug": "a bug in batchinfer",
}


def is_published(status: str | None) -> bool:
    """Return True if the results are published after a run with this exit status."""
    return status is not None and status.startswith((PUBLISHED, ALREADY_PUBLISHED))


def over_budget(status: str) -> str:
    """Return the exit status of a run that published its result with more error rows than allowed.

    Args:
        status: The exit status without this fact: `published` or `already published`.
    """
    return f"{status} {OVER_BUDGET}"
