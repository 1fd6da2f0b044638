"""Rows in, finished prompts out: tokens, parameters and keys for a batch. This is what a render worker runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from batchinfer.core.request import RowError, TokenIds
from batchinfer.core.sampling import SamplingParams, Truncate
from batchinfer.data.constraints.constraint_check import ConstraintChecker
from batchinfer.data.constraints.per_constraint import PerConstraint
from batchinfer.data.input.rows import RowProblem, Values, row_error
from batchinfer.data.prompts.builder import Draft, PromptBuilder, PromptPlan
from batchinfer.data.prompts.keys import token_bytes, work_key
from batchinfer.data.tokenizer.tokenizer import Tokenizer

BULK = -1  # what the worker reports while it tokenises a whole batch at once


def checking(row: int) -> int:
    """Return the number that a worker reports while another process checks the constraint of `row`, which may take
    longer than the worker may take for a row."""
    return BULK - 1 - row


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a finished prompt: `vocab_size` ids, `max_model_len` positions; `context` enters the keys.

    `job_limit`: whether the job set `max_model_len`; otherwise it is what the model was made for.
    """

    max_model_len: int
    vocab_size: int
    truncate: Truncate
    context: bytes
    job_limit: bool = False

    def length(self) -> str:
        """The limit on tokens and where it comes from, for people."""
        if self.job_limit:
            return f"model.max_model_len of the job allows {self.max_model_len:,}"
        return f"the model reads at most {self.max_model_len:,}"

    def remedy(self) -> str:
        """Return advice that makes a prompt fit, or nothing: the model's own limit cannot be raised."""
        return ", or raise model.max_model_len" if self.job_limit else ""


@dataclass(slots=True)
class Prepared:
    """A batch of n rows, ready for the index. An error row has count 0, a zero key and parameter 0.

    `tokens` are the prompts end to end; `params` lists distinct parameters, `params_of` (n,) points into it;
    `max_tokens` (n,).
    """

    errors: dict[int, RowError]
    params: list[str]
    params_of: list[int]
    max_tokens: list[int]
    counts: TokenIds
    keys: bytes
    tokens: TokenIds

    def keys_of_work(self) -> bytes:
        """Return the keys of the rows that are no error rows."""
        return np.frombuffer(self.keys, np.uint8).reshape(-1, 32)[np.asarray(self.counts) > 0].tobytes()


class Preparer:
    """Renders and tokenises. `report` is told which row is at work, so that a hang can be pinned on it."""

    def __init__(
        self, plan: PromptPlan, limits: Limits, tokenizer: Tokenizer, report: Callable[[int], None]
    ) -> None:
        self._builder = PromptBuilder(plan, tokenizer)
        self._limits = limits
        self._tokenizer = tokenizer
        self._segments = tokenizer.segments()
        self._constraints = CheckedConstraints(plan.params, tokenizer.definition)
        self._report = report

    def prepare(self, rows: Sequence[Values], careful: bool = False) -> Prepared:
        """`careful`: tokenise row by row, to find the row that brings the tokenizer down."""
        work = _Batch(len(rows))
        drafts = self._drafts(rows, work)
        encoded = self._encoded(drafts, work, careful)
        for index, draft in drafts.items():
            if index not in encoded:
                continue
            try:
                work.rows[index] = (self._fitted(encoded[index], draft), draft.params)
            except RowProblem as problem:
                work.errors[index] = problem.error
        return work.finished(self._limits.context)

    def _drafts(self, rows: Sequence[Values], work: _Batch) -> dict[int, Draft]:
        drafts: dict[int, Draft] = {}
        for index, row in enumerate(rows):
            self._report(index)
            try:
                draft = self._builder.build(row)
                if self._constraints.are_due(draft.params):
                    self._report(checking(index))
                    self._constraints.check(draft.params)
                drafts[index] = draft
            except RowProblem as problem:
                work.errors[index] = problem.error
        return drafts

    def _encoded(self, drafts: dict[int, Draft], work: _Batch, careful: bool) -> dict[int, Sequence[int]]:
        encoded: dict[int, Sequence[int]] = {i: d.token_ids for i, d in drafts.items() if d.text is None}
        for special in (False, True):
            plain = [
                i
                for i, d in drafts.items()
                if d.text is not None and not d.masks and d.add_special is special
            ]
            if plain and not (not careful and self._in_bulk(plain, drafts, special, encoded)):
                self._one_by_one(plain, drafts, encoded, work)
        masked = [i for i, d in drafts.items() if d.masks]
        self._one_by_one(masked, drafts, encoded, work)
        return encoded

    def _in_bulk(
        self, which: list[int], drafts: dict[int, Draft], special: bool, encoded: dict[int, Sequence[int]]
    ) -> bool:
        self._report(BULK)
        try:
            texts = [drafts[i].text for i in which]
            found = self._tokenizer.rust.encode_batch_fast(texts, add_special_tokens=special)
        except BaseException as error:
            if not _is_tokenizer_failure(error):
                raise
            return False
        encoded.update((i, encoding.ids) for i, encoding in zip(which, found, strict=True))
        return True

    def _one_by_one(
        self, which: list[int], drafts: dict[int, Draft], encoded: dict[int, Sequence[int]], work: _Batch
    ) -> None:
        for index in which:
            self._report(index)
            try:
                encoded[index] = self._encode(drafts[index])
            except BaseException as error:
                if not _is_tokenizer_failure(error):
                    raise
                work.errors[index] = row_error("tokenizer_failed", "the tokenizer cannot encode this prompt")

    def _encode(self, draft: Draft) -> Sequence[int]:
        text = draft.text or ""
        if draft.masks:
            return self._segments.encode(text, draft.masks)
        ids: Sequence[int] = self._tokenizer.rust.encode(text, add_special_tokens=draft.add_special).ids
        return ids

    def _fitted(self, ids: Sequence[int], draft: Draft) -> TokenIds:
        """The prompt as it will run. Raises RowProblem when it is empty, too long or has unknown ids."""
        tokens = np.array(ids, dtype=np.int32)
        limit = self._limits.max_model_len
        if not len(tokens):
            raise RowProblem("empty_prompt", "the prompt has no tokens")
        if int(tokens.max()) >= self._limits.vocab_size:
            message = f"token id {int(tokens.max())}; the model knows ids below {self._limits.vocab_size}"
            raise RowProblem("token_id_out_of_range", message)
        if len(tokens) + 1 <= limit:
            return tokens
        if self._limits.truncate == "error":
            message = (
                f"the prompt has {len(tokens):,} tokens and needs room for one more; {self._limits.length()}; shorten "
                f"it, or set prompt.truncate to left or right to cut such prompts{self._limits.remedy()}"
            )
            raise RowProblem("prompt_too_long", message, "policy")
        keep = limit - draft.params.max_tokens
        if keep < 1:  # one token of a prompt would be answered, and nobody told
            message = (
                f"max_tokens {draft.params.max_tokens:,} leaves no room for a prompt; {self._limits.length()}; lower "
                f"max_tokens{self._limits.remedy()}"
            )
            raise RowProblem("prompt_too_long", message, "policy")
        return tokens[-keep:] if self._limits.truncate == "left" else tokens[:keep]


class CheckedConstraints:
    """Compiles each constraint that rows have of their own, once, to refuse what cannot be followed before the engine
    meets it. That of `job`, the parameters of all rows, was checked before. `definition`: of the tokenizer."""

    def __init__(self, job: SamplingParams, definition: str) -> None:
        self._job = _constraint_of(job)
        self._problems = PerConstraint(ConstraintChecker(definition).problem)

    def are_due(self, params: SamplingParams) -> bool:
        """Whether the constraint of `params` is to be checked."""
        return params.constraint is not None and _constraint_of(params) != self._job

    def check(self, params: SamplingParams) -> None:
        """Raises RowProblem for a constraint that cannot be compiled."""
        if (problem := self._problems.of(params)) is not None:
            raise RowProblem("bad_constraint", problem)


def _constraint_of(params: SamplingParams) -> tuple[str | None, Any]:
    """Its name and text. Rows with the job's have the very same text, which is found equal at once."""
    return params.constraint, getattr(params, params.constraint) if params.constraint else None


def _is_tokenizer_failure(error: BaseException) -> bool:
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@dataclass(slots=True)
class _Batch:
    """Collects a batch's rows while they are prepared."""

    size: int
    errors: dict[int, RowError] = field(default_factory=dict)
    rows: dict[int, tuple[TokenIds, SamplingParams]] = field(default_factory=dict)

    def finished(self, context: bytes) -> Prepared:
        numbers: dict[SamplingParams, int] = {}
        texts: list[str] = []
        result = Prepared(self.errors, texts, [0] * self.size, [0] * self.size, *_empty(self.size))
        keys, tokens_out = bytearray(32 * self.size), []
        for index, (tokens, params) in self.rows.items():
            if params not in numbers:
                numbers[params] = len(texts)
                texts.append(params.canonical().to_json())
            number = numbers[params]
            data = token_bytes(tokens)
            keys[32 * index : 32 * index + 32] = work_key(context, texts[number], data)
            result.counts[index], result.params_of[index] = len(tokens), number
            result.max_tokens[index] = params.max_tokens
            tokens_out.append(tokens)
        joined = np.concatenate(tokens_out) if tokens_out else np.zeros(0, np.int32)
        return replace(result, keys=bytes(keys), tokens=joined)


def _empty(size: int) -> tuple[TokenIds, bytes, TokenIds]:
    return np.zeros(size, np.int32), b"", np.zeros(0, np.int32)
