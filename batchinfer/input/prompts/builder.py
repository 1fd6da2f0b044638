"""Builds the prompt of a row from templates, messages, text, token ids or an OpenAI request.

Runs in a render worker (render_worker.py), because a template may hang or exhaust the memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal, NamedTuple

import jinja2
from jinja2 import nodes

from batchinfer.core.reasoning import Reasoning
from batchinfer.core.rung import Rung
from batchinfer.core.sampling import OTHER_NAMES, SamplingParams
from batchinfer.core.scoring import MAX_LABELS, PairScoring, Scoring
from batchinfer.core.tool_calls import CallStyle
from batchinfer.input.json_text import parse_value
from batchinfer.input.openai import CHAT_URL, TOOLS, VECTOR_URL, openai_request
from batchinfer.input.prompts.arguments.row_tools import RowTools
from batchinfer.input.prompts.arguments.template_arguments import (
    RowArguments,
    TemplateArguments,
    arguments_read,
    reads_tools,
)
from batchinfer.input.prompts.arguments.tool_choice import ToolChoice
from batchinfer.input.prompts.chat import Chat
from batchinfer.input.prompts.chat_template import (
    ChatTemplate,
    Message,
    NullRendered,
    row_environment,
    variables,
)
from batchinfer.input.prompts.fits import ConstraintMaxTokens
from batchinfer.input.prompts.parameters.named_adapters import NamedAdapters
from batchinfer.input.prompts.parameters.vector_requests import VectorRequests, parse_embedding_request
from batchinfer.input.prompts.sampling_fields import (
    SAMPLES,
    from_text,
    override,
    override_openai,
    parse_samples,
)
from batchinfer.input.prompts.simple_template import SimpleTemplate
from batchinfer.input.prompts.template_specials import TemplateSpecials
from batchinfer.input.rows import RowProblem, Values, kind_of
from batchinfer.input.tokenizer.masks import mask_texts, masks_for, texts_of
from batchinfer.input.tokenizer.tokenizer import Tokenizer

Mode = Literal["template", "messages", "text", "token_ids", "openai"]
ROLES = ("system", "developer", "user", "assistant", "tool")
OTHER_PARTS = ("image", "image_url", "input_image", "audio", "input_audio", "video", "video_url", "file")
MAX_TEXT_BYTES = 4 << 20
_MOST_BYTES = 4  # maximum bytes of a character in UTF-8
_MAX_TOKENS = ("max_tokens", *(called for called, name in OTHER_NAMES.items() if name == "max_tokens"))
ROW_VARIABLE = "row"  # {{ row["a column with spaces"] }}


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The rules by which a job turns rows into prompts. Small and picklable: each render worker gets it once.

    Args:
        mode: The source of the prompt: templates, or a column with messages, text, token ids or an OpenAI request.
        params: The job's sampling parameters; OpenAI requests use `by_url` instead.
        system: The template of the system message.
        user: The template of the user message, or of the whole prompt without `chat`.
        column: The column of the prompt in the modes messages, text and token_ids.
        overrides: Pairs of a sampling parameter and the column that sets it.
        values_are_text: True if numbers, messages and token ids must be parsed from text, as in CSV.
        by_url: The default sampling parameters of OpenAI requests per endpoint.
        one_schema: True if OpenAI requests must not have another JSON schema than the job, because the job's schema
            determines the columns of the result.
        now: The time that chat templates may write into prompts.
        max_text_bytes: The maximum size of a prompt text in UTF-8.
        fits: True if a row without its own `max_tokens` gets the maximum that its constraint can need.
        chat: False if the text of `user` is the whole prompt, without a chat template.
        chat_template: Replaces the checkpoint's chat template.
        arguments: The arguments of the chat template for all rows.
        argument_columns: Pairs of an argument of the chat template and the column that sets it.
        tools_column: The column of a row's own tools.
        ladder: The sampling parameters of further attempts, for a row whose answer is invalid.
        reasoning: How the checkpoint marks its reasoning.
        tool_calls: The syntax of the checkpoint's tool calls.
        forced_call: The tool call that every answer must make: `tool_choice` and `parallel_tool_calls` as in an OpenAI
            request.
        before: A text that is put before text prompts.
        vectors: The embeddings that OpenAI requests may ask for.
        no_vectors: Why the job makes no embeddings, for messages.
        samples: The number of answers per row.
        samples_column: The column that overrides `samples`.
        scoring: The kind of scores, or None if answers are generated.
        continuation: The column of the continuations to score; None for labels or for the prompt itself.
        labels: The column with labels of each row; None if all rows have the job's labels.
        pairs: How pairs of a prompt and a document are scored, or None.
        document: The column of the documents of these pairs.
        adapters: The fingerprints of the adapters by name.
        adapter_column: The column that names the adapter of a row.
    """

    mode: Mode
    params: SamplingParams
    system: str | None = None
    user: str | None = None
    column: str | None = None
    overrides: tuple[tuple[str, str], ...] = ()
    values_are_text: bool = False
    by_url: Mapping[str, SamplingParams] = field(default_factory=dict)
    one_schema: bool = False
    now: datetime = datetime(1970, 1, 1)
    max_text_bytes: int = MAX_TEXT_BYTES
    fits: bool = False
    chat: bool = True
    chat_template: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    argument_columns: tuple[tuple[str, str], ...] = ()
    tools_column: str | None = None
    ladder: tuple[Rung, ...] = ()
    reasoning: Reasoning | None = None
    tool_calls: CallStyle | None = None
    forced_call: Mapping[str, Any] = field(default_factory=dict)
    before: str = ""
    vectors: VectorRequests | None = None
    no_vectors: str = ""
    samples: int = 1
    samples_column: str | None = None
    scoring: Scoring | None = None
    continuation: str | None = None
    labels: str | None = None
    pairs: PairScoring | None = None
    document: str = ""
    adapters: Mapping[str, str] = field(default_factory=dict)
    adapter_column: str | None = None


class Draft(NamedTuple):
    """The prompt of a row before it is tokenised: either `text` or `token_ids`, with the parameters of the row.

    Args:
        params: The row's sampling parameters.
        text: The text of the prompt, or None.
        token_ids: The tokens of the prompt, if there is no text.
        add_special: True if the tokenizer adds its special tokens, such as BOS.
        masks: Texts in the row that look like special tokens, by the placeholder that replaces each in `text`. They are
            tokenised as plain text.
        unread: The names of the row's arguments that the chat template does not read.
        tools: The row's tools as JSON text in the format of `known_tools`, or None.
        continuations: The texts or tokens to score after the prompt; for a pair, the document. (): score the prompt
            itself, except its first token. None: score nothing.
        labels: The row's own labels as a JSON list, or None.
        samples: The number of answers that the row asks for; 0 for the job's number.
        dimensions: The size of its embeddings; 0 for the job's size.
        further: Further inputs of an embedding request, as texts or token ids. Each becomes a request of its own.
    """

    params: SamplingParams
    text: str | None = None
    token_ids: Sequence[int] = ()
    add_special: bool = False
    masks: dict[str, str] | None = None
    unread: tuple[str, ...] = ()
    tools: str | None = None
    continuations: tuple[str | Sequence[int], ...] | None = None
    labels: str | None = None
    samples: int = 0
    dimensions: int = 0
    further: Sequence[str | Sequence[int]] = ()

    def each(self) -> Iterator[Draft]:
        """Yield a draft per input of an embedding request: this draft, then a copy for each input in `further`."""
        yield self
        for one in self.further:
            own = (one, ()) if isinstance(one, str) else (None, one)
            yield self._replace(text=own[0], token_ids=own[1], further=())


def template_columns(source: str | None) -> set[str]:
    """Return the names of columns that a template of the job reads, with `row` for the whole row. Empty for None.

    Args:
        source: The text of the template, or None.

    Raises:
        jinja2.TemplateSyntaxError: The template does not compile.
    """
    if source is None:
        return set()
    environment = row_environment()
    return variables(environment, environment.parse(source))


_CHATS: tuple[Mode, ...] = ("template", "messages", "openai")  # modes that use the checkpoint's chat template


class PromptBuilder:
    """Builds the Draft of each row: its prompt and parameters before tokenisation.

    A template may hang or crash the process, so the process that uses this class must be supervised.

    Args:
        plan: The rules of the job.
        tokenizer: The tokenizer of the checkpoint.
    """

    def __init__(self, plan: PromptPlan, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._fits = ConstraintMaxTokens(plan.reasoning)
        self._specials = tokenizer.special_pattern if tokenizer.specials else None
        self._own = None if plan.chat else TemplateSpecials(tokenizer.special_pattern)
        self._system = _RowTemplate("prompt.system", plan.system) if plan.system is not None else None
        self._user = _RowTemplate("prompt.user", plan.user, self._own) if plan.user is not None else None
        source = (plan.chat_template or tokenizer.chat_template) if plan.mode in _CHATS else None
        self._chat = Chat(ChatTemplate(source, tokenizer.named, plan.now)) if source is not None else None
        self._arguments = RowArguments(
            plan.arguments,
            plan.argument_columns,
            arguments_read(source) if source is not None else frozenset(),
            plan.values_are_text,
            plan.max_text_bytes,
            plan.tools_column,
            source is not None and reads_tools(source),
        )
        self._tools = RowTools()
        reasons = plan.reasoning is not None and plan.reasoning.tokens is not None
        self._choice = ToolChoice(plan.tool_calls, tokenizer, reasons)
        self._adapters = NamedAdapters(plan.adapters, plan.adapter_column)
        self._build: Callable[[Values], Draft] = {
            "template": self._from_templates if plan.chat else self._from_whole_template,
            "messages": self._from_messages,
            "text": self._from_text,
            "token_ids": self._from_token_ids,
            "openai": self._from_openai,
        }[plan.mode]

    def build(self, values: Values) -> Draft:
        """Build the prompt of a row and its parameters.

        Args:
            values: The values of the row by column.

        Raises:
            RowProblem: The row is invalid.
        """
        draft = self._with_samples(self._build(values), values)
        if self._plan.adapters:
            draft = draft._replace(params=self._with_adapter(draft.params, values))
        if self._plan.scoring is not None:
            draft = self._with_scoring(draft, self._plan.scoring, values)
        if self._plan.pairs is not None:
            document = self._text(self._plan.document, "document", "is the document", values)
            draft = draft._replace(add_special=False, continuations=(document,))
        for text in (draft.text, *draft.further):
            if isinstance(text, str):
                _check_length(text, self._plan.max_text_bytes)
        return draft

    def _with_adapter(self, params: SamplingParams, values: Values) -> SamplingParams:
        if self._plan.mode == "openai":
            return self._adapters.of_request(params, values["body"])
        return self._adapters.of_row(params, values)

    def _with_samples(self, draft: Draft, values: Values) -> Draft:
        if draft.params.pooling is not None and self._plan.mode == "openai":
            return draft._replace(samples=1 + len(draft.further))
        asked = self._own_samples(values)
        if (asked or self._plan.samples) > 1 and draft.params.greedy:
            raise RowProblem("bad_parameter", "temperature is 0, and n > 1 equal answers are of no use")
        return draft if asked is None else draft._replace(samples=asked)

    def _own_samples(self, values: Values) -> int | None:
        if self._plan.mode == "openai":
            return parse_samples(values["body"].get(SAMPLES))
        if (column := self._plan.samples_column) is None:
            return None
        value = values.get(column)
        return parse_samples(from_text(SAMPLES, value) if self._plan.values_are_text else value, column)

    def _with_scoring(self, draft: Draft, scoring: Scoring, values: Values) -> Draft:
        if self._plan.labels is None:
            return draft._replace(continuations=self._continuations(scoring, values))
        given = values.get(self._plan.labels)
        as_text = self._plan.values_are_text and isinstance(given, str)
        labels = check_labels(self._plan.labels, parse_value(str(given)) if as_text else given)
        text = json.dumps(labels, ensure_ascii=False)
        return draft._replace(continuations=tuple(labels), labels=text)

    def _continuations(self, scoring: Scoring, values: Values) -> tuple[str | Sequence[int], ...]:
        name = self._plan.continuation
        if name is None:
            return scoring.choices
        value = values.get(name)
        if self._plan.mode == "token_ids" and value is not None:
            as_text = self._plan.values_are_text and isinstance(value, str)
            return (check_token_ids(parse_value(value) if as_text else value),)
        return (self._text(name, "continuation", "is to be scored", values),)

    def _text(self, name: str, what: str, why: str, values: Values) -> str:
        if (value := values.get(name)) is None:
            raise RowProblem(f"{what}_missing", f"column {name!r}, which {why}, is null or missing")
        if not isinstance(value, str):
            raise RowProblem(f"{what}_type", f"column {name!r} must be text, not {kind_of(value)}")
        if _MOST_BYTES * len(value) > self._plan.max_text_bytes:
            limit = self._plan.max_text_bytes // _MOST_BYTES
            raise RowProblem(
                "text_too_long", f"column {name!r} is over the limit of {limit} characters", "policy"
            )
        return value

    def _params(self, values: Values) -> SamplingParams:
        if not self._plan.overrides and not self._plan.fits:
            return override(self._plan.params, {})
        given = {name: values.get(column) for name, column in self._plan.overrides}
        if self._plan.values_are_text:
            given = {name: from_text(name, value) for name, value in given.items()}
        return self._with_fit(override(self._plan.params, given, dict(self._plan.overrides)), given)

    def _with_fit(self, params: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
        if not self._plan.fits or any(given.get(name) is not None for name in _MAX_TOKENS):
            return params
        return self._fits.with_max_tokens(params)

    def _from_templates(self, values: Values) -> Draft:
        messages: list[Message] = []
        for role, template in (("system", self._system), ("user", self._user)):
            if template is not None:
                messages.append({"role": role, "content": template.render(values)})
        return self._row_draft(messages, values)

    def _from_whole_template(self, values: Values) -> Draft:
        # Only the template's own text may contain special tokens
        assert self._user is not None
        assert self._own is not None
        text, masks = self._own.resolve(self._user.render(values))
        return Draft(self._params(values), self._plan.before + text, add_special=True, masks=masks)

    def _from_messages(self, values: Values) -> Draft:
        messages = check_messages(self._column(values))
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system.render(values)})
        return self._row_draft(messages, values)

    def _row_draft(self, messages: list[Message], values: Values) -> Draft:
        params, template_arguments = self._params(values), self._arguments.of_row(values)
        if self._plan.forced_call:
            params = self._choice.params(
                params, self._plan.forced_call, template_arguments.arguments.get(TOOLS)
            )
        return self._chat_draft(messages, params, template_arguments)

    def _from_text(self, values: Values) -> Draft:
        text = self._plan.before + check_text(self._column(values))
        return Draft(self._params(values), text, add_special=True)

    def _from_token_ids(self, values: Values) -> Draft:
        return Draft(self._params(values), token_ids=check_token_ids(self._column(values)))

    def _from_openai(self, values: Values) -> Draft:
        url, body = openai_request(values, self._plan.by_url, self._plan.no_vectors)
        if url == VECTOR_URL:
            return self._from_vector_request(self._plan.by_url[url], body)
        name = "messages" if url == CHAT_URL else "prompt"
        params = override_openai(self._plan.by_url[url], body, name)
        if self._plan.one_schema and params.json_schema != self._plan.params.json_schema:
            raise RowProblem(
                "bad_parameter", "the request asks for other answers than output.schema of the job describes"
            )
        if params.thinking_budget is not None and (
            self._plan.reasoning is None or not self._plan.reasoning.tokens
        ):
            raise RowProblem(
                "bad_parameter", "thinking_budget: this checkpoint has no tokens that mark reasoning"
            )
        params = self._with_fit(params, body)
        if url == CHAT_URL:
            template_arguments = self._arguments.of_request(body)
            params = self._choice.params(params, body, template_arguments.arguments.get(TOOLS))
            return self._chat_draft(check_messages(body.get(name)), params, template_arguments)
        prompt = body.get(name)
        if isinstance(prompt, list):
            return Draft(params, token_ids=check_token_ids(prompt))
        return Draft(params, check_text(prompt), add_special=True)

    def _from_vector_request(self, params: SamplingParams, body: Values) -> Draft:
        assert self._plan.vectors is not None, (
            "requests for vectors are only accepted if the job makes vectors"
        )
        asked = parse_embedding_request(body, self._plan.vectors)
        first, *further = [
            check_token_ids(one) if isinstance(one, list) else asked.before + one for one in asked.inputs
        ]
        draft = Draft(params, add_special=asked.add_special, dimensions=asked.dimensions, further=further)
        return draft._replace(text=first) if isinstance(first, str) else draft._replace(token_ids=first)

    def _column(self, values: Values) -> Any:
        name = str(self._plan.column)
        if name not in values:
            raise RowProblem("prompt_missing", f"the row has no column {name!r}")
        value = values[name]
        if self._plan.values_are_text and self._plan.mode != "text" and isinstance(value, str):
            return parse_value(value)
        return value

    def _chat_draft(
        self, messages: list[Message], params: SamplingParams, template_arguments: TemplateArguments
    ) -> Draft:
        if self._chat is None:
            raise RowProblem("no_chat_template", "the checkpoint has no chat template; use prompt.text")
        masks, arguments, tools = (
            None,
            template_arguments.arguments,
            self._tools.of(template_arguments.arguments),
        )
        pattern = self._specials
        if pattern is not None and (_holds(pattern.search, messages) or _holds(pattern.search, [arguments])):
            masks = masks_for([messages, arguments], pattern)
            by_literal = {literal: mask for mask, literal in masks.items()}
            messages, arguments = mask_texts([messages, arguments], by_literal, pattern.sub)
        return Draft(
            params,
            self._chat.render(messages, arguments),
            masks=masks,
            unread=template_arguments.unread,
            tools=tools,
        )


def _check_length(text: str, limit: int) -> None:
    if len(text) > limit // _MOST_BYTES and len(text.encode("utf-8", "replace")) > limit:
        raise RowProblem("text_too_long", f"the rendered prompt is over the limit of {limit} bytes", "policy")


class _RowTemplate:
    """A Jinja template of the job, compiled once. It is rendered for each row, unless it has no expressions.

    Args:
        where: The key of the template in the job file, for messages.
        source: The text of the template.
        own: Marks the special tokens that the template itself writes, or None to treat them as plain text.
    """

    def __init__(self, where: str, source: str, own: TemplateSpecials | None = None) -> None:
        self._where = where
        environment = row_environment()
        tree = environment.parse(source)
        if own is not None:
            own.mark(tree)
        self._names = sorted(variables(environment, tree))
        self._constant = _constant_text(tree)
        self._template = environment.from_string(tree)
        self._whole_row = ROW_VARIABLE in self._names
        self._simple = SimpleTemplate.of(tree)

    def render(self, values: Values) -> str:
        if self._constant is not None:
            return self._constant
        text = self._simple.render(values) if self._simple is not None else None
        if text is not None:
            return text
        try:
            return self._render(values)
        except NullRendered:
            raise RowProblem("null_in_template", self._null_message(values)) from None
        except MemoryError:
            raise RowProblem(
                "template_memory", f"{self._where} asks for too much memory", "resource"
            ) from None
        except Exception as error:  # noqa: BLE001 - a template may raise anything; only this row fails
            raise RowProblem("template_error", f"{self._where}: {self._explained(error, values)}") from None

    def _render(self, values: Values) -> str:
        if self._whole_row and ROW_VARIABLE not in values:
            values = {**values, ROW_VARIABLE: values}
        return self._template.render(values)

    def _explained(self, error: Exception, values: Values) -> str:
        missing = [n for n in self._names if n not in values and n != ROW_VARIABLE]
        if isinstance(error, jinja2.UndefinedError) and missing:
            return f"the row has no column {missing[0]!r}"
        return f"{type(error).__name__} while rendering"  # the error's text could quote the row

    def _null_message(self, values: Values) -> str:
        nulls = [n for n in self._names if n in values and values[n] is None]
        name = nulls[0] if nulls else "column"
        shown = f"column {name!r} is null" if nulls else "a value is null"
        return f"{self._where}: {shown}; give a default: {{{{ {name} or '' }}}}"


def check_messages(value: Any) -> list[Message]:
    """Check the messages of a chat. In the result, each content is a text: lists of text parts are joined.

    Args:
        value: The list of messages, each with a role and a content.

    Raises:
        RowProblem: The value is no list of messages, or a message is invalid or has an unsupported content.
    """
    if value is None:
        raise RowProblem("prompt_missing", "messages is null or missing")
    if not isinstance(value, list):
        raise RowProblem("prompt_type", f"messages must be a list, not {kind_of(value)}")
    if not value:
        raise RowProblem("empty_messages", "messages is an empty list")
    return [_checked(number, message) for number, message in enumerate(value)]


def _checked(number: int, message: Any) -> Message:
    if not isinstance(message, dict):
        raise RowProblem("prompt_type", f"messages[{number}] must be an object, not {kind_of(message)}")
    kept = {name: item for name, item in message.items() if item is not None}
    if kept.get("role") not in ROLES:
        raise RowProblem("unknown_role", f"messages[{number}].role must be one of {', '.join(ROLES)}")
    kept["content"] = _content(number, kept.get("content"), calls="tool_calls" in kept)
    return kept


def _content(number: int, content: Any, calls: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and calls:
        return ""
    if isinstance(content, list):
        return "".join(_part(number, part) for part in content)
    raise RowProblem("prompt_type", f"messages[{number}].content must be text, not {kind_of(content)}")


def _part(number: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        found = f"; this is one of type {kind}" if kind in OTHER_PARTS else ""
        raise RowProblem(
            "unsupported_content", f"messages[{number}].content: only parts of type text are read{found}"
        )
    return text


def check_text(value: Any) -> str:
    """Return a prompt that must be a text, unchanged. Raises RowProblem if the value is not a text."""
    if value is None:
        raise RowProblem("prompt_missing", "the prompt is null or missing")
    if not isinstance(value, str):
        raise RowProblem("prompt_type", f"the prompt must be text, not {kind_of(value)}")
    return value


def check_labels(column: str, value: Any) -> list[str]:
    """Return the labels of a row. Raises RowProblem if they are not a list of distinct, non-empty texts.

    Args:
        column: The column of the labels, for messages.
        value: Its value.
    """
    if value is None:
        raise RowProblem(
            "labels_missing", f"column {column!r}, which has the row's labels, is null or missing"
        )
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise RowProblem("labels_type", f"column {column!r} must be a list of texts, not {kind_of(value)}")
    if not 1 <= len(value) <= MAX_LABELS:
        raise RowProblem(
            "labels_type", f"column {column!r} has {len(value):,} labels; a row must have 1 to {MAX_LABELS:,}"
        )
    if len({*value}) < len(value):
        raise RowProblem("labels_type", f"column {column!r} has the same label twice; list each label once")
    return value


def check_token_ids(value: Any) -> list[int]:
    """Return a prompt's token ids as a list. Raises RowProblem if the value is no list of non-negative integers."""
    if value is None:
        raise RowProblem("prompt_missing", "the token ids are null or missing")
    if not isinstance(value, list):
        raise RowProblem("prompt_type", f"token ids must be a list, not {kind_of(value)}")
    for position, number in enumerate(value):
        if not isinstance(number, int | Decimal) or isinstance(number, bool) or number != int(number):
            raise RowProblem(
                "prompt_type", f"token id {position} must be a whole number, not {kind_of(number)}"
            )
        if not 0 <= number < 2**31:
            raise RowProblem("token_id_out_of_range", f"token id {position} is {str(number)[:40]}")
    return [int(number) for number in value]


def _constant_text(tree: nodes.Template) -> str | None:
    pieces: list[str] = []
    for statement in tree.body:
        if not isinstance(statement, nodes.Output):
            return None
        for node in statement.nodes:
            if not isinstance(node, nodes.TemplateData):
                return None
            pieces.append(node.data)
    return "".join(pieces)


def _holds(search: Callable[[str], Any], messages: Sequence[Mapping[str, Any]]) -> bool:
    for message in messages:
        if len(message) > 2 and any(map(search, message)):
            return True
        for value in message.values():
            if search(value) if type(value) is str else any(map(search, texts_of(value))):
                return True
    return False
