"""Turns a chunk of rows into finished prompts with tokens, parameters and work keys. Runs in a render worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.continuations import longest_sequence
from batchinfer.core.request import RowError, TokenIds
from batchinfer.core.rung import Rung, with_rung
from batchinfer.core.sampling import SamplingParams, Truncate
from batchinfer.input.chunk import InputChunk
from batchinfer.input.constraints.constraint_check import ConstraintChecker
from batchinfer.input.constraints.per_constraint import PerConstraint
from batchinfer.input.prompts.arguments.unread import UnreadArguments
from batchinfer.input.prompts.builder import Draft, PromptBuilder, PromptPlan
from batchinfer.input.prompts.keys import KEY_BYTES, TOKEN_BYTES, WorkKeys, token_bytes
from batchinfer.input.prompts.parameters.named_tokens import NamedTokens
from batchinfer.input.prompts.prepared.continued import ContinuedPrompts
from batchinfer.input.prompts.prepared.paired import PairedTexts
from batchinfer.input.prompts.prepared.rows import (
    FurtherPrompts,
    OwnTexts,
    PreparedPrompts,
    PreparedRows,
    PreparedRungs,
)
from batchinfer.input.prompts.row_facts import FactsCollector, RowFields
from batchinfer.input.rows import RowProblem, Values, row_error
from batchinfer.input.tokenizer.pair_template import PairTemplate
from batchinfer.input.tokenizer.reasoned_rows import ReasonedRows
from batchinfer.input.tokenizer.reasoning_styles import ReasoningOpenings
from batchinfer.input.tokenizer.tokenizer import Tokenizer

_BULK_ROWS = 512
_BULK_CHARACTERS = 1 << 20
_NO_TOKENS: TokenIds = np.zeros(0, np.int32)
_NO_KEY = bytes(KEY_BYTES)
_NO_OPENINGS: ReasoningOpenings = np.zeros(0, np.int8)
BULK = -1  # reported while the worker tokenises a batch of prompts


def checking(row: int) -> int:
    """Return the number that a render worker reports in place of a row number while it checks the row's constraint.

    It is negative, so the parent process allows more time than for a row.

    Args:
        row: The number of the row.
    """
    return BULK - 1 - row


@dataclass(frozen=True, slots=True)
class RowPiece:
    """A range of rows of a chunk that are prepared together. At the end of a chunk there may be fewer rows.

    Args:
        start: The first row, counted from the start of the chunk.
        stop: The row after the last one.
        accused: True if the piece is a single row, and an earlier process died while it worked on this row.
        careful: True to tokenise rows one by one, so that a failure concerns one row.
        given: For a single row whose error is known: the error. The row is then only read.
    """

    start: int
    stop: int
    accused: bool = False
    careful: bool = False
    given: RowError | None = None

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on the length and the token ids of prompts.

    Args:
        max_model_len: The maximum number of tokens of a prompt and its answer.
        vocab_size: The number of token ids of the model.
        truncate: Which side of a prompt is truncated if it is too long, or "error".
        context: The settings of the job that enter every work key.
        job_limit: True if the job sets `max_model_len`, False if the model does.
        room: The number of tokens that must fit after a prompt; 0 if answers are vectors.
        may_truncate: True if the job may set prompt.truncate.
    """

    max_model_len: int
    vocab_size: int
    truncate: Truncate
    context: bytes
    job_limit: bool = False
    room: int = 1
    may_truncate: bool = True

    def length(self) -> str:
        """Return a text for error messages: the maximum number of tokens, and whether the job or the model sets it."""
        if self.job_limit:
            return f"model.max_model_len of the job allows {self.max_model_len:,}"
        return f"the model reads at most {self.max_model_len:,}"

    def truncation_advice(self) -> str:
        """Return a text for error messages that advises to set prompt.truncate, or "" if the job cannot set it."""
        return ", or set prompt.truncate to left or right to cut such prompts" if self.may_truncate else ""

    def remedy(self) -> str:
        """Return a text for error messages that advises to raise model.max_model_len; "" if the job does not set it."""
        return ", or raise model.max_model_len" if self.job_limit else ""


class Preparer:
    """Turns the rows of chunks into prompts: reads, renders and tokenises them.

    Args:
        plan: The rules by which the job turns rows into prompts.
        limits: The limits of a prompt.
        tokenizer: The tokenizer of the checkpoint.
        report: Called with the number of the row before the work on it begins. If the process hangs, its parent then
            knows the row.
        fields: The values to take from a row.
    """

    def __init__(
        self,
        plan: PromptPlan,
        limits: Limits,
        tokenizer: Tokenizer,
        report: Callable[[int], None],
        fields: RowFields,
    ) -> None:
        self._builder = PromptBuilder(plan, tokenizer)
        self._limits = limits
        self._fields = fields
        self._tokenizer = tokenizer
        self._segments = tokenizer.segments()
        self._continued = self._make_joiner(plan)
        self._plain = plan.params  # rows without overrides have these; their constraint was checked before
        self._ladder = plan.ladder
        self._constraints = CheckedConstraints(plan.params, tokenizer.definition)
        self._reasoned = ReasonedRows(plan.reasoning, tokenizer)
        self._named = NamedTokens(tokenizer, limits.vocab_size)
        self._report = report

    def _make_joiner(self, plan: PromptPlan) -> ContinuedPrompts | PairedTexts | None:
        if plan.pairs is not None:
            template, limits = PairTemplate.of(self._tokenizer.rust), self._limits
            return PairedTexts(template, plan.pairs, limits.max_model_len, limits.truncate)
        if plan.scoring is None:
            return None
        return ContinuedPrompts(self._tokenizer, self._segments, plan.scoring.choices)

    def prepare(self, chunk: InputChunk, piece: RowPiece | None = None) -> PreparedRows:
        """Read, render and tokenise rows of a chunk, and return their prompts.

        Args:
            chunk: The chunk.
            piece: The rows of the chunk to prepare, or None for all.
        """
        piece = piece or RowPiece(0, chunk.most_rows)
        facts = FactsCollector(self._fields)
        work = _FinishedPrompts(self._limits.context, self._reasoned, self._ladder)
        held = _Drafts()
        size = 0
        for index, row in self._number_rows(chunk.read(piece.start, piece.stop, self._fields.values)):
            size = index + 1
            facts.note(row)
            if isinstance(row, RowError):
                work.errors[index] = row
            elif piece.given is not None:
                work.errors[index] = piece.given
            else:
                for draft in self._drafts(index, row, work):
                    held.add(index, draft)
                    if held.full:
                        self._finish(held, work, piece.careful)
                        held = _Drafts()
        self._finish(held, work, piece.careful)
        return PreparedRows(work.finish(size), facts.finish())

    def _number_rows(self, rows: Iterator[Values | RowError]) -> Iterator[tuple[int, Values | RowError]]:
        # A number is reported before its row is read, since reading may exhaust the memory, too
        for index in count():
            self._report(index)
            row = next(rows, None)
            if row is None:
                return
            yield index, row

    def _drafts(self, index: int, row: Values, work: _FinishedPrompts) -> Iterable[Draft]:
        try:
            draft = self._builder.build(self._fields.needed(row))
            if draft.unread:
                work.unread.add(draft.unread)
            if draft.params is not self._plain and self._constraints.must_check(draft.params):
                self._report(checking(index))
                self._constraints.check(draft.params)
            return draft._replace(params=self._named.add_tokens(draft.params)).each()
        except RowProblem as problem:
            work.errors[index] = problem.error
            return ()

    def _finish(self, held: _Drafts, work: _FinishedPrompts, careful: bool) -> None:
        encoded = self._encode_drafts(held, work, careful)
        if self._continued is not None:
            encoded = self._with_continuations(self._continued, held, encoded, work, careful)
        held.keep([at for at, ids in enumerate(encoded) if ids is not None])
        ids = [one for one in encoded if one is not None]
        tokens, counts = _flat(ids)
        if not self._all_fit(tokens, counts):
            tokens, counts = self._fit_each(held, tokens, counts, work)
        work.add(held, tokens, counts)

    def _encode_drafts(
        self, held: _Drafts, work: _FinishedPrompts, careful: bool
    ) -> list[Sequence[int] | None]:
        drafts = held.drafts
        encoded: list[Sequence[int] | None] = [d.token_ids if d.text is None else None for d in drafts]
        for special in (False, True):
            plain = [
                at
                for at, d in enumerate(drafts)
                if d.add_special is special and d.text is not None and not d.masks
            ]
            if plain and not (not careful and self._in_bulk(plain, drafts, special, encoded)):
                self._one_by_one(plain, held, encoded, work)
        self._one_by_one([at for at, d in enumerate(drafts) if d.masks], held, encoded, work)
        return encoded

    def _with_continuations(
        self,
        continued: ContinuedPrompts | PairedTexts,
        held: _Drafts,
        encoded: Sequence[Sequence[int] | None],
        work: _FinishedPrompts,
        careful: bool,
    ) -> list[Sequence[int] | None]:
        more, counts = _Drafts(), list[int]()
        for row, draft, ids in zip(held.rows, held.drafts, encoded, strict=True):
            asked = [] if ids is None else continued.to_encode(draft)
            counts.append(len(asked))
            for one in asked:
                more.add(row, one)
        found, joined = iter(self._encode_drafts(more, work, careful)), list[Sequence[int] | None]()
        for at, (draft, ids, size) in enumerate(zip(held.drafts, encoded, counts, strict=True)):
            own = [*islice(found, size)]
            whole = [one for one in own if one is not None]
            joined.append(None)
            if ids is None or len(whole) < len(own):
                continue
            try:
                joined[at], params = continued.join(draft, ids, whole, self._encode)
                if draft.params.adapter:
                    params = replace(params, adapter=draft.params.adapter)
                held.drafts[at] = draft._replace(params=params)
            except RowProblem as problem:
                work.errors[held.rows[at]] = problem.error
            except BaseException as error:
                if not _is_tokenizer_failure(error):
                    raise
                work.errors[held.rows[at]] = row_error(
                    "tokenizer_failed", "the tokenizer cannot encode this prompt"
                )
        return joined

    def _in_bulk(
        self,
        which: list[int],
        drafts: Sequence[Draft],
        special: bool,
        encoded: list[Sequence[int] | None],
    ) -> bool:
        self._report(BULK)
        try:
            texts = [drafts[at].text for at in which]
            found = self._tokenizer.rust.encode_batch_fast(texts, add_special_tokens=special)
        except BaseException as error:
            if not _is_tokenizer_failure(error):
                raise
            return False
        for at, encoding in zip(which, found, strict=True):
            encoded[at] = encoding.ids
        return True

    def _one_by_one(
        self, which: list[int], held: _Drafts, encoded: list[Sequence[int] | None], work: _FinishedPrompts
    ) -> None:
        for at in which:
            index = held.rows[at]
            self._report(index)
            try:
                encoded[at] = self._encode(held.drafts[at])
            except BaseException as error:
                if not _is_tokenizer_failure(error):
                    raise
                work.errors[index] = row_error("tokenizer_failed", "the tokenizer cannot encode this prompt")

    def _encode(self, draft: Draft) -> Sequence[int]:
        text = draft.text or ""
        if draft.masks:
            return self._segments.encode(text, draft.masks, draft.add_special)
        ids: Sequence[int] = self._tokenizer.rust.encode(text, add_special_tokens=draft.add_special).ids
        return ids

    def _all_fit(self, tokens: TokenIds, counts: TokenIds) -> bool:
        if not len(counts):
            return True
        shortest, longest = int(counts.min()), int(counts.max())
        fits = shortest > 0 and longest + self._limits.room <= self._limits.max_model_len
        return fits and int(tokens.max()) < self._limits.vocab_size

    def _fit_each(
        self, held: _Drafts, tokens: TokenIds, counts: TokenIds, work: _FinishedPrompts
    ) -> tuple[TokenIds, TokenIds]:
        kept: dict[int, TokenIds] = {}
        ends = np.cumsum(counts)
        for at, prompt in enumerate(np.split(tokens, ends[:-1])):
            try:
                kept[at] = self._fit(prompt, held.drafts[at])
            except RowProblem as problem:
                work.errors[held.rows[at]] = problem.error
        held.keep(list(kept))
        lengths = np.array([len(prompt) for prompt in kept.values()], np.int32)
        return np.concatenate([_NO_TOKENS, *kept.values()]), lengths

    def _fit(self, tokens: TokenIds, draft: Draft) -> TokenIds:
        limit = self._limits.max_model_len
        if not len(tokens):
            raise RowProblem("empty_prompt", "the prompt has no tokens")
        if int(tokens.max()) >= self._limits.vocab_size:
            message = f"token id {int(tokens.max())}; the model knows ids below {self._limits.vocab_size}"
            raise RowProblem("token_id_out_of_range", message)
        scored = draft.params.scored
        longest = longest_sequence(len(tokens), scored)
        room = min(1, draft.params.max_tokens)  # vectors and scores need no room
        if longest + room <= limit:
            return tokens
        if self._limits.truncate == "error":
            more = " and needs room for one more" if room else " including the scored text" if scored else ""
            message = (
                f"the prompt has {longest:,} tokens{more}; {self._limits.length()}; shorten "
                f"it{self._limits.truncation_advice()}{self._limits.remedy()}"
            )
            raise RowProblem("prompt_too_long", message, "policy")
        keep = limit - draft.params.max_tokens
        if keep < 1:  # an answer to almost no prompt would go unnoticed
            message = (
                f"max_tokens {draft.params.max_tokens:,} leaves no room for a prompt; {self._limits.length()}; lower "
                f"max_tokens{self._limits.remedy()}"
            )
            raise RowProblem("prompt_too_long", message, "policy")
        return (
            self._truncate_before(tokens, scored, limit, draft)
            if scored
            else self._truncate(tokens, keep, draft)
        )

    def _truncate_before(
        self, tokens: TokenIds, scored: tuple[int, ...], limit: int, draft: Draft
    ) -> TokenIds:
        context = len(tokens) - sum(scored)
        keep = limit + 1 - max(scored)  # the last scored token needs no position
        if keep < 1 or draft.continuations == ():
            message = f"the scored text has {max(scored):,} tokens; {self._limits.length()}; shorten it"
            raise RowProblem("prompt_too_long", f"{message}{self._limits.remedy()}", "policy")
        before = self._segments.surrounding_ids[0] if draft.add_special else []
        before = before if len(before) < keep else []
        inner, kept = tokens[len(before) : context], keep - len(before)
        truncated = inner[-kept:] if self._limits.truncate == "left" else inner[:kept]
        return np.concatenate([tokens[: len(before)], truncated, tokens[context:]]).astype(np.int32)

    def _truncate(self, tokens: TokenIds, keep: int, draft: Draft) -> TokenIds:
        # Tokens that the tokenizer adds around a text are kept: the last one may give the vector of the text
        text = draft.params.gives_tokens or not draft.add_special
        before, behind = ([], []) if text else self._segments.surrounding_ids
        inner = tokens[len(before) : len(tokens) - len(behind)]
        kept = keep - len(before) - len(behind)
        if kept < 1:
            before, behind, inner, kept = [], [], tokens, keep
        truncated = inner[-kept:] if self._limits.truncate == "left" else inner[:kept]
        return np.concatenate([np.array(before, np.int32), truncated, np.array(behind, np.int32)]).astype(
            np.int32
        )


class CheckedConstraints:
    """Checks that constraints of rows compile, before an engine gets them. Each distinct constraint is compiled once.

    Args:
        job: The sampling parameters of the job. Its constraint was checked before.
        definition: The tokenizer as the text of a tokenizer.json.
    """

    def __init__(self, job: SamplingParams, definition: str) -> None:
        self._job = _constraint_of(job)
        self._problems = PerConstraint(ConstraintChecker(definition).problem)

    def must_check(self, params: SamplingParams) -> bool:
        """Return True if `params` have a constraint of their own, and not the job's, which was checked before."""
        return params.constraint is not None and _constraint_of(params) != self._job

    def check(self, params: SamplingParams) -> None:
        """Raise RowProblem if the constraint of `params` is invalid or unsupported."""
        if (problem := self._problems.of(params)) is not None:
            raise RowProblem("bad_constraint", problem)


def _constraint_of(params: SamplingParams) -> tuple[str | None, Any]:
    # Rows with the job's constraint share its text object, so comparing the results is fast
    return params.constraint, getattr(params, params.constraint) if params.constraint else None


def _is_tokenizer_failure(error: BaseException) -> bool:
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class _Drafts:
    def __init__(self) -> None:
        self.rows: list[int] = []
        self.drafts: list[Draft] = []
        self._characters = 0

    def add(self, row: int, draft: Draft) -> None:
        self.rows.append(row)
        self.drafts.append(draft)
        self._characters += len(draft.text or "")

    @property
    def full(self) -> bool:
        # The tokenizer takes about 100 bytes of memory per token
        return len(self.rows) >= _BULK_ROWS or self._characters >= _BULK_CHARACTERS

    def keep(self, places: Sequence[int]) -> None:
        if len(places) < len(self.rows):
            self.rows = [self.rows[at] for at in places]
            self.drafts = [self.drafts[at] for at in places]


class _FinishedPrompts:
    def __init__(self, context: bytes, reasoned: ReasonedRows, ladder: Sequence[Rung]) -> None:
        self._context, self._reasoned = context, reasoned
        self._rungs = [_FinishedRung(rung) for rung in ladder]
        self.errors: dict[int, RowError] = {}
        self.unread = UnreadArguments()
        self._params: dict[SamplingParams, int] = {}
        self._last: tuple[SamplingParams | None, int] = (None, 0)
        self._texts: list[str] = []
        self._makers: list[WorkKeys] = []
        self._rows: list[int] = []
        self._params_of: list[int] = []
        self._max_tokens: list[int] = []
        self._samples: list[int] = []
        self._dimensions: list[int] = []
        self._keys: list[bytes] = []
        self._openings: list[ReasoningOpenings] = [_NO_OPENINGS]
        self._own_texts: dict[str, int] = {}
        self._own_text_of: list[int] = []
        self._counts: list[TokenIds] = [_NO_TOKENS]
        self._tokens: list[TokenIds] = [_NO_TOKENS]

    def add(self, held: _Drafts, tokens: TokenIds, counts: TokenIds) -> None:
        data, end, openings = token_bytes(tokens), 0, self._reasoned.openings(tokens, counts)
        for draft, size, opening in zip(held.drafts, counts.tolist(), openings.tolist(), strict=True):
            start, end = end, end + TOKEN_BYTES * size
            params = self._reasoned.params(draft.params, opening)
            number = self._number(params)
            self._params_of.append(number)
            self._max_tokens.append(params.max_tokens)
            self._samples.append(draft.samples)
            self._dimensions.append(draft.dimensions)
            maker, own = self._makers[number], data[start:end]
            self._keys.append(maker.key(own))
            text = draft.tools if draft.labels is None else draft.labels
            self._own_text_of.append(
                0 if text is None else self._own_texts.setdefault(text, len(self._own_texts) + 1)
            )
            if self._rungs:
                self._add_rungs(draft.params, opening, number, own)
        self._rows += held.rows
        self._openings.append(openings)
        self._counts.append(counts)
        self._tokens.append(tokens)

    def _add_rungs(self, params: SamplingParams, opening: int, number: int, tokens: bytes) -> None:
        # An attempt is left out if its parameters equal an earlier attempt's, since the answer would be the same
        earlier = {self._texts[number]}
        for rung in self._rungs:
            if not params.gives_tokens:  # a vector is the same each time
                rung.add(-1, 0, _NO_KEY)
                continue
            if (number, opening) not in rung.numbers:
                rung.numbers[number, opening] = self._rung_params(params, opening, rung.rung)
            at, most = rung.numbers[number, opening]
            if at is None or self._texts[at] in earlier:
                rung.add(-1, 0, _NO_KEY)
            else:
                earlier.add(self._texts[at])
                rung.add(at, most, self._makers[at].key(tokens))

    def _rung_params(self, params: SamplingParams, opening: int, rung: Rung) -> tuple[int | None, int]:
        found = self._reasoned.params(with_rung(params, rung), opening)
        return self._number(found) if found.min_tokens <= found.max_tokens else None, found.max_tokens

    def _number(self, params: SamplingParams) -> int:
        last, number = self._last
        if params is not last:  # comparing parameters by value would take most of the time here
            self._last = params, number = params, self._added(params)
        return number

    def _added(self, params: SamplingParams) -> int:
        number = self._params.get(params)
        if number is None:
            number = self._params[params] = len(self._texts)
            self._texts.append(params.canonical().to_json())
            self._makers.append(WorkKeys(self._context, self._texts[-1]))
        return number

    def finish(self, size: int) -> PreparedPrompts:
        rows, counts, tokens = (
            np.array(self._rows, np.int64),
            *map(np.concatenate, (self._counts, self._tokens)),
        )
        keys = np.frombuffer(b"".join(self._keys), np.uint8).reshape(-1, KEY_BYTES)
        first, further = _first_prompts(rows, self.errors)
        of_first, of_further = np.repeat(first, counts), np.repeat(further, counts)
        first_rows = rows[first]

        def column(values: Any, kind: type[np.generic] = np.int32) -> NDArray[Any]:
            found = np.zeros((size, *np.shape(values)[1:]), kind)
            found[first_rows] = np.asarray(values, kind)[first]
            return found

        rungs = [rung.finish(size, first, first_rows) for rung in self._rungs]
        own = OwnTexts.found(self._own_texts, column(self._own_text_of))
        return PreparedPrompts(
            self.errors,
            self._texts,
            column(self._params_of),
            column(self._max_tokens),
            column(counts),
            column(keys, np.uint8).tobytes(),
            tokens[of_first],
            column(np.concatenate(self._openings), np.int8),
            self.unread.rows,
            rungs,
            own,
            samples=column(self._samples) if any(self._samples) else None,
            dimensions=column(self._dimensions) if any(self._dimensions) else None,
            further=FurtherPrompts(
                rows[further].astype(np.int32), counts[further], keys[further].tobytes(), tokens[of_further]
            ),
        )


class _FinishedRung:
    def __init__(self, rung: Rung) -> None:
        self.rung = rung
        # A cache from (number of a row's parameters, how its prompt ends) to (number of the attempt's parameters or
        # None, their max_tokens)
        self.numbers: dict[tuple[int, int], tuple[int | None, int]] = {}
        self._params_of: list[int] = []
        self._max_tokens: list[int] = []
        self._keys: list[bytes] = []

    def add(self, number: int, max_tokens: int, key: bytes) -> None:
        self._params_of.append(number)
        self._max_tokens.append(max_tokens)
        self._keys.append(key)

    def finish(self, size: int, which: NDArray[np.bool_], rows: NDArray[np.int64]) -> PreparedRungs:
        found = PreparedRungs(np.full(size, -1, np.int32), np.zeros(size, np.int32), b"")
        found.params_of[rows] = np.array(self._params_of, np.int32)[which]
        found.max_tokens[rows] = np.array(self._max_tokens, np.int32)[which]
        keys = np.zeros((size, KEY_BYTES), np.uint8)
        keys[rows] = np.frombuffer(b"".join(self._keys), np.uint8).reshape(-1, KEY_BYTES)[which]
        found.keys = keys.tobytes()
        return found


def _first_prompts(
    rows: NDArray[np.int64], errors: Mapping[int, RowError]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    first = np.diff(rows, prepend=-1) > 0
    valid = ~np.isin(rows, [*errors]) if errors else np.ones(len(rows), np.bool_)
    return first & valid, ~first & valid


def _flat(rows: Sequence[Sequence[int]]) -> tuple[TokenIds, TokenIds]:
    counts = np.array([len(row) for row in rows], np.int32)
    return np.fromiter(chain.from_iterable(rows), np.int32, int(counts.sum(dtype=np.int64))), counts
