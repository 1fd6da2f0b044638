"""Implements `batchinfer validate`: the checks of a run, without computing."""

from __future__ import annotations

from datetime import UTC, datetime

from batchinfer.core.wording import size
from batchinfer.filesystem.state import state_of
from batchinfer.input.prompts.arguments.template_arguments import arguments_read
from batchinfer.input.prompts.chat_template import chat_environment
from batchinfer.input.prompts.template_check import template_fault
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.job import Job
from batchinfer.pipeline.engine_machine import engine_machine
from batchinfer.plan.setup.checks import kv_memory_warnings
from batchinfer.plan.setup.input_check import check_input, dry_run
from batchinfer.plan.setup.job_setup import check_setup


def validate_job(job: Job) -> list[str]:
    """Check a job as a run does before it computes, and prepare its first rows.

    Returns:
        Lines for users about the job.
    """
    state = state_of(job)
    machine = engine_machine(job, state)
    setup = check_setup(job, state, machine.facts, reader=machine.reader)
    checkpoint, tokenizer, numerics = setup.checkpoint, setup.tokenizer, setup.setting.numerics
    found = [
        f"model: {checkpoint.spec.family}, {size(checkpoint.weight_bytes)} of weights, "
        f"to be run in {numerics.text} on {numerics.device}, up to {numerics.max_model_len} tokens a row",
        *checkpoint.notices,
        *_adapters(job),
        f"tokenizer: {tokenizer.vocab_size} tokens, "
        + ("with a chat template" if tokenizer.chat_template else "without a chat template"),
        *_arguments(setup.tokenizer),
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
    found += kv_memory_warnings(job, setup.models)
    return [*found, *facts.warnings, *dry_run(job, setup), "the job file has no mistakes"]


def _adapters(job: Job) -> list[str]:
    names, chosen = ", ".join(job.model.adapters), job.model.adapter
    return [f"adapters: {names}; rows that name none have {chosen or 'no adapter'}"] if names else []


def _arguments(tokenizer: Tokenizer) -> list[str]:
    template = tokenizer.chat_template
    if template is None or template_fault(chat_environment(datetime(2000, 1, 1, tzinfo=UTC)), template):
        return []
    read = sorted(arguments_read(template))
    return [f"chat template: reads the arguments {', '.join(read)}"] if read else []
