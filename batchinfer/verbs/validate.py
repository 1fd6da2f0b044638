"""`batchinfer validate`: the checks of a run, without computing."""

from __future__ import annotations

from batchinfer.core.wording import size
from batchinfer.data.storage.state import state_of
from batchinfer.job import Job
from batchinfer.plan.setup.dry_run import dry_run
from batchinfer.plan.setup.input_check import check_input
from batchinfer.plan.setup.job_setup import check_setup


def validate_job(job: Job) -> list[str]:
    """Check a job as a run does before it computes, and prepare its first rows; return what was found out, as lines."""
    state = state_of(job)
    setup = check_setup(job, state)
    checkpoint, setting, tokenizer = setup.checkpoint, setup.setting, setup.tokenizer
    found = [
        f"model: {checkpoint.spec.family}, {size(checkpoint.weight_bytes)} of weights, "
        f"to be run in {setting.arithmetic} on {setting.device}, up to {setting.max_model_len} tokens a row",
        *checkpoint.notices,
        f"tokenizer: {tokenizer.vocab_size} tokens, "
        + ("with a chat template" if tokenizer.chat_template else "without a chat template"),
    ]
    facts = check_input(job, setup, state)
    if facts.files:
        found.append(f"input: {facts.files} file{'s' * (facts.files != 1)}, {size(facts.bytes)}")
    if job.sampling.from_columns:
        found.append(f"sampling: rows set their own {job.sampling.row_parameters()}")
    if setup.most_tokens is not None:
        found.append(f"sampling: an answer has at most {setup.most_tokens:,} tokens (max_tokens: fit)")
    if setup.columns is not None:
        found.append("columns of answers: " + ", ".join(f"{f.name} {f.type}" for f in setup.columns.schema))
        found += [str(note) for note in setup.columns.notes]
    return [*found, *facts.warnings, *dry_run(job, setup), "the job file has no mistakes"]
