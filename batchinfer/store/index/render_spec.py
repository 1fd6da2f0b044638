"""Describes to the render workers how the rows of a job become requests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.openai import CHAT_URL, TEXT_URL, VECTOR_URL, openai_defaults
from batchinfer.input.prompts.builder import Mode, PromptPlan
from batchinfer.input.prompts.columns import Columns
from batchinfer.input.prompts.prepare import Limits
from batchinfer.input.prompts.render_worker import RenderSpec
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.store.index.ingest_options import IngestOptions

if TYPE_CHECKING:
    from batchinfer.job import Job


def render_spec(
    job: Job,
    options: IngestOptions,
    tokenizer: Tokenizer,
    columns: Columns,
    mode: Mode,
    schema: pa.Schema | None,
    values_are_text: bool,
) -> RenderSpec:
    """Return the description from which render workers prepare the rows of an input.

    Args:
        job: The job.
        options: Options that are not in the job file.
        tokenizer: The tokenizer of the model.
        columns: The columns that the job uses.
        mode: How a row becomes a prompt.
        schema: The types of the columns. None: the format declares none.
        values_are_text: True if all values of the input are texts, as in a CSV file.
    """
    plan = _prompt_plan(job, options, columns, mode, values_are_text)
    limits = Limits(
        options.max_model_len,
        options.vocab_size,
        job.prompt.truncate if job.prompt else "error",
        options.context,
        job.model.max_model_len is not None,
        options.room,
        may_truncate=job.task != "rerank" or options.asked.pairs is not None,
    )
    as_text = job.carried if schema is None or values_are_text else ()
    fields = columns.fields(as_text, endpoints=mode == "openai", declared=schema is not None)
    definition, source = tokenizer.definition, str(job.source)
    return RenderSpec(job.model.path, definition, plan, limits, fields, source, options.row_timeout_s)


def _prompt_plan(
    job: Job, options: IngestOptions, columns: Columns, mode: Mode, values_are_text: bool
) -> PromptPlan:
    prompt, asked = job.prompting, options.asked
    return PromptPlan(
        mode=mode,
        params=_with_adapter(job, options, _params_of_task(job, options)),
        scoring=asked.scoring,
        continuation=job.score.continuation,
        labels=job.classify.choices_from_column,
        pairs=asked.pairs,
        document=job.rerank.document or "",
        before="" if asked.embedding is None else asked.embedding.prompt,
        vectors=asked.vectors,
        no_vectors=asked.no_vectors,
        system=prompt.system,
        user=prompt.user,
        column=columns.prompt,
        overrides=columns.overrides,
        values_are_text=values_are_text,
        by_url=_params_by_url(job, options),
        one_schema=job.output.json_schema is not None,
        now=options.now,
        fits=job.sampling.fits,
        chat=prompt.chat,
        chat_template=job.chat_template,
        arguments=prompt.arguments | prompt.given_tools,
        argument_columns=prompt.template_arguments_from_columns,
        tools_column=prompt.tools_from_column,
        ladder=job.on_invalid,
        reasoning=asked.reasoning,
        tool_calls=asked.tool_calls,
        samples=job.samples,
        samples_column=job.sampling.samples_column,
        forced_call=prompt.forced_call,
        adapters=options.adapters,
        adapter_column=job.model.adapter_from_column,
    )


def _with_adapter(job: Job, options: IngestOptions, params: SamplingParams) -> SamplingParams:
    name = job.model.adapter
    return params if name is None else replace(params, adapter=options.adapters[name])


def _params_of_task(job: Job, options: IngestOptions) -> SamplingParams:
    asked = options.asked
    if asked.scoring is not None:
        return SamplingParams.scores()
    if asked.pairs is not None:
        return SamplingParams.logits(asked.pairs.pooling)
    if job.task == "embed" and asked.embedding is not None:
        return SamplingParams.vector(asked.embedding.pooling)
    return job.params()


def _params_by_url(job: Job, options: IngestOptions) -> dict[str, SamplingParams]:
    embedding, found = options.asked.embedding, dict[str, SamplingParams]()
    if job.task == "generate":
        given, length = job.given_params(), options.max_model_len
        found |= {url: openai_defaults(url, given, length) for url in (CHAT_URL, TEXT_URL)}
    if embedding is not None:
        found[VECTOR_URL] = SamplingParams.vector(embedding.pooling)
    return {url: _with_adapter(job, options, params) for url, params in found.items()}
