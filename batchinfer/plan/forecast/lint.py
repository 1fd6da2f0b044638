"""Finds input that keeps rows from sharing work, and estimates what a different prompt would save."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from batchinfer.core.errors import OutOfMemory
from batchinfer.core.request import RowError
from batchinfer.core.wording import count
from batchinfer.input.job_input import open_input
from batchinfer.input.prompts.template_parts import TemplatePart, join_parts, template_parts
from batchinfer.job import Job
from batchinfer.machine.cpus import usable_cpus
from batchinfer.plan.forecast.engine import forecast_engine
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.planner import plan_job
from batchinfer.plan.order.requests import read_requests
from batchinfer.plan.order.sharing import field_order
from batchinfer.plan.setup.job_setup import Setup
from batchinfer.store.index.index import Index
from batchinfer.store.index.ingest import ingest, with_files

MOST_ROWS = 20_000  # rows that are examined, which takes seconds per variant of the prompt
SIMULATE_S = 1.0  # for each variant
LEAST_SHARE = 0.01  # share of the computed prompt tokens; smaller savings are not reported
_BATCH = 1024
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class LintFinding:
    """A suggestion for the input or the prompt, with the tokens and time that it saves.

    Savings are for the whole job, as if no answer were stored yet.

    Attributes:
        kind: "text_behind_fields": fixed text should come before the fields. "field_order": the fields should have
            another order. "near_duplicates": rows differ only in white space or case.
        text: The suggestion, for people.
        saved_tokens: Prompt tokens that need not be computed if the suggestion is followed.
        share: `saved_tokens` as a share (0 to 1) of the prompt tokens that are computed now.
        saved_s: Seconds that are saved. None if unknown.
        template: The suggested `prompt.user`. None for near duplicates.
        rows: Number of near duplicates. None for other kinds.
    """

    kind: str
    text: str
    saved_tokens: int
    share: float
    saved_s: float | None
    template: str | None = None
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class PromptVariant:
    """The first rows of a job, indexed and planned with one variant of the prompt template.

    Attributes:
        plan: The plan of the rows.
        index: The index of the rows.
        seconds: Forecast engine time. None if unknown.
    """

    plan: Plan
    index: Index
    seconds: float | None

    @property
    def tokens(self) -> int:
        """Return the number of prompt tokens of the rows, if each shared prefix is computed and counted once."""
        return self.plan.prompt_tokens - self.plan.shared_prefix_tokens


@dataclass(frozen=True, slots=True)
class Linter:
    """Looks for work that rows could share if the prompt template or the input were changed.

    It examines the first rows of the input.

    Attributes:
        job: The job.
        setup: The job's model, tokenizer and setting.
        index: The index of all rows.
        scratch: Folder for the indexes that are made with other variants of the prompt template.
    """

    job: Job
    setup: Setup
    index: Index
    scratch: Path

    def findings(self) -> list[LintFinding]:
        """Return the suggestions that each save at least LEAST_SHARE (1 %) of the computed prompt tokens.

        Raises:
            StorageError: The input or a file of the index cannot be read or written.
            OutOfMemory: Planning needs too much memory.
        """
        if not self.index.rows:
            return []
        first = self._planned(self._first_rows())
        return [*self._templates(first), *self._near_duplicates(first)]

    def _templates(self, first: PromptVariant) -> Iterator[LintFinding]:
        source = None if self.job.prompt is None else self.job.prompt.user
        parts = None if source is None else template_parts(source)
        if source is None or not parts:
            return
        parts, end = (parts[:-1], parts[-1:]) if parts[-1].is_label else (parts, [])
        texts = [part for part in parts if not part.columns]
        fields = [part for part in parts if part.columns]
        ways = {"text_behind_fields": [*texts, *fields], "field_order": [*texts, *self._sorted(fields)]}
        before, seen = first, parts
        for kind, ordered in ways.items():
            if ordered == seen:
                continue
            template = join_parts([*ordered, *end], source)
            after = self._planned(self._read(template))
            if before.tokens - after.tokens >= max(1, LEAST_SHARE * before.tokens):
                yield self._reordered(kind, _advice(kind, ordered, seen), template, before, after)
                before, seen = after, ordered

    def _sorted(self, fields: Sequence[TemplatePart]) -> list[TemplatePart]:
        if len(fields) < 2:
            return list(fields)
        values: list[list[bytes]] = [[] for _ in fields]
        lengths, rows = [0] * len(fields), 0
        for row in self._rows():
            rows += 1
            for number, field in enumerate(fields):
                found = _value(row, field.columns)
                values[number].append(_digest(found))
                lengths[number] += len(found)
        return [fields[number] for number in field_order(values, [size / max(1, rows) for size in lengths])]

    def _rows(self) -> Iterator[dict[str, Any]]:
        reader = open_input(self.job, self.index.inputs)
        for batch in reader.batches(limit=self._looked_at):
            yield from (row for row in batch.rows if not isinstance(row, RowError))

    @property
    def _looked_at(self) -> int:
        return min(self.index.rows, MOST_ROWS)

    def _first_rows(self) -> Index:
        return self.index if self._looked_at == self.index.rows else self._read(None)

    def _read(self, template: str | None) -> Index:
        job = _with_template(self.job, template, self.index).first_rows(self._looked_at)
        return ingest(job, self.setup.tokenizer, self.setup.ingest_options(), self.scratch)

    def _planned(self, index: Index) -> PromptVariant:
        plan = plan_job(
            index.index_parts,
            index.tokens,
            [],
            index.folder / "plan",
            self.setup.roots,
            shares=self.setup.setting.parts.shares_prefixes,
            threads=usable_cpus(),
        )
        return PromptVariant(plan, index, self._seconds(plan, index))

    def _seconds(self, plan: Plan, index: Index) -> float | None:
        if self.setup.setting.peaks is None or not plan.to_run:
            return None
        try:
            engine = forecast_engine(self.job, self.setup, plan)
        except OutOfMemory:  # reported by the job's forecast
            return None
        return engine.forecast(index.tokens, SIMULATE_S).seconds

    def _reordered(
        self, kind: str, text: str, template: str, before: PromptVariant, after: PromptVariant
    ) -> LintFinding:
        saved, scale = before.tokens - after.tokens, self.index.rows / self._looked_at
        saved_s = None
        if before.seconds is not None and after.seconds is not None:
            saved_s = (before.seconds - after.seconds) * scale
        return LintFinding(kind, text, round(saved * scale), saved / before.tokens, saved_s, template)

    def _near_duplicates(self, first: PromptVariant) -> Iterator[LintFinding]:
        alike: dict[bytes, dict[bytes, int]] = {}  # normalised text: {exact text: unshared tokens}
        for text, params, own in self._texts(first):
            common = _digest(_SPACE.sub(" ", text).strip().casefold(), params)
            alike.setdefault(common, {})[_digest(text)] = own
        rows = sum(len(texts) - 1 for texts in alike.values())
        tokens = sum(sum(texts.values()) - min(texts.values()) for texts in alike.values())
        if tokens >= LEAST_SHARE * first.tokens and rows:
            scale, share = self.index.rows / self._looked_at, tokens / first.tokens
            rows = round(rows * scale)
            text = "differ from another row only in white space or case; written alike, they would be computed once"
            yield LintFinding("near_duplicates", text, round(tokens * scale), share, None, rows=rows)

    def _texts(self, first: PromptVariant) -> Iterator[tuple[str, str, int]]:
        # Yields text, sampling parameters as JSON, and unshared tokens. Only greedy rows: equal prompts then
        # have equal answers.
        before = 0  # tokens shared with the previous prompt
        for batch, requests in read_requests(first.plan, first.index.tokens, _BATCH, self.setup.roots):
            texts = self.setup.tokenizer.decode_batch([request.prompt.tolist() for request in requests])
            for text, params, request in zip(texts, batch.params, requests, strict=True):
                shared, before = max(before, request.shares_next), request.shares_next
                if request.params.greedy:
                    yield text, params, len(request.prompt) - min(shared, len(request.prompt) - 1)


def _with_template(job: Job, template: str | None, index: Index) -> Job:
    prompt = job.prompt
    if prompt is not None and template is not None:
        prompt = prompt.model_copy(update={"user": template})
    bare = with_files(job, index.inputs)
    output = bare.output.model_copy(update={"columns": ()})
    given = bare.input.model_copy(update={"expected": None})
    return bare.model_copy(update={"prompt": prompt, "output": output, "input": given})


def _digest(*texts: str) -> bytes:
    found = blake2b(digest_size=16)
    for text in texts:
        data = text.encode(errors="surrogatepass")
        found.update(len(data).to_bytes(8, "little") + data)
    return found.digest()


def _value(row: dict[str, Any], columns: Sequence[str]) -> str:
    found = [row.get(name) if name != "row" else row for name in columns]
    return json.dumps(found, default=str, sort_keys=True)


def _advice(kind: str, ordered: Sequence[TemplatePart], before: Sequence[TemplatePart]) -> str:
    if kind == "field_order":
        names = ", ".join("{{ " + " }}, {{ ".join(part.columns) + " }}" for part in ordered if part.columns)
        return f"rows would share longer prefixes with the fields of prompt.user in this order: {names}"
    fields = [number for number, part in enumerate(before) if part.columns]
    late = [part for part in before[fields[0] :] if not part.columns]
    lines = ", ".join(
        str(part.first_line) if part.first_line == part.last_line else f"{part.first_line}-{part.last_line}"
        for part in late
    )
    name = "line" if lines.isdigit() else "lines"
    same = f"the fixed text in {name} {lines} of prompt.user"
    return f"all rows would share {same} if it were before the first field"


def finding_text(found: LintFinding) -> str:
    """Return a suggestion and its savings as one line."""
    prefix = f"{count(found.rows)} rows " if found.rows is not None else ""
    less = f"{found.saved_tokens:,} prompt tokens fewer ({found.share:.0%})"
    faster = f", about {found.saved_s:,.1f} s" if found.saved_s is not None and found.saved_s > 0 else ""
    return f"{prefix}{found.text}: {less}{faster}"
