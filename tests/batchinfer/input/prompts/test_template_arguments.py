"""Arguments of published chat templates: which they read, how they render, and limits on rows' arguments."""

from __future__ import annotations

import itertools
import json
import string
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.prompts.arguments.template_arguments import RowArguments, arguments_read
from batchinfer.input.prompts.arguments.unread import UnreadArguments, unread_text
from batchinfer.input.prompts.builder import Draft, PromptBuilder, PromptPlan
from batchinfer.input.prompts.chat import Chat
from batchinfer.input.prompts.chat_template import ChatTemplate
from batchinfer.input.rows import RowProblem
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from tests.batchinfer.input.prompts.chat_families import FAMILIES
from tests.batchinfer.store.index.ingest_kit import byte_bpe, checkpoint
from tests.examples import examples

NAMED = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
CHATS = [
    [("user", "Hi"), ("assistant", "<think>\nx\n</think>\n\nYo"), ("user", " why? ")],
    [("system", "Be brief."), ("user", "{{ a }}\n")],
    [("system", "/no_think"), ("user", "Hi"), ("assistant", "Yo"), ("user", "x")],
    [("user", "again /nothink")],
    [("system", "Be nice."), ("user", "two")],
]
THINKING = FAMILIES["qwen3"].source


def messages(chat: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in chat]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_arguments_that_a_template_reads_are_found(name: str) -> None:
    assert arguments_read(FAMILIES[name].source) == FAMILIES[name].reads


@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_render_as_in_transformers(name: str) -> None:
    """Includes the shortcut for conversations of one shape."""
    family = FAMILIES[name]
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_bpe(), chat_template=family.source, **NAMED)
    ours = Chat(ChatTemplate(family.source, NAMED, datetime.now()))
    for chat, told in itertools.product(CHATS * 2, family.told):
        text = theirs.apply_chat_template(messages(chat), tokenize=False, add_generation_prompt=True, **told)
        assert ours.render(messages(chat), told) == text


def test_arguments_that_are_equal_in_python_are_distinguished() -> None:
    source = "{{ 'T' if a is true else 'F' if a is false else a }}{{ messages[0].content }}"
    ours = Chat(ChatTemplate(source, NAMED, datetime(2026, 1, 1)))
    values = [True, 1, 1.0, 0, False, "1", -0.0]
    for content in ("x", "y"):
        found = [ours.render(messages([("user", content)]), {"a": value}) for value in values]
        assert found == [shown + content for shown in ("T", "1", "1.0", "0", "F", "1", "-0.0")]


@pytest.mark.parametrize("source", [
    "{{ messages }}{{ tools }}{{ add_generation_prompt }}{{ bos_token }}{{ eos_token }}",
    "{{ strftime_now('%d') }}{{ raise_exception('x') }}{{ range(3) }}{{ namespace() }}",
    "{% set x = 1 %}{{ x }}",
    "{% if messages %}{% set x = 1 %}{% else %}{% set x = 2 %}{% endif %}{{ x }}",
    "{% for x, y in messages %}{{ x }}{{ loop.index }}{% endfor %}",
    "{% macro f(x, y=1) %}{{ x }}{{ y }}{{ caller }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1) }}",
    "{{ self.x }}",
])  # fmt: skip
def test_what_a_template_has_or_sets_itself_is_no_argument(source: str) -> None:
    assert not arguments_read(source)


def test_a_name_that_is_only_sometimes_set_is_read() -> None:
    assert arguments_read("{% if messages %}{% set x = 1 %}{% endif %}{{ x }}") == {"x"}
    assert arguments_read("{% for m in messages %}{% set x = 1 %}{% endfor %}{{ x }}") == {"x"}


def arguments(
    reads: str = "a b documents reasoning_effort", texts: bool = False, **common: Any
) -> RowArguments:
    return RowArguments(common, (("a", "a_col"), ("b", "b")), frozenset(reads.split()), texts, 1 << 16)


def test_a_row_adds_arguments_to_those_of_the_job() -> None:
    told = arguments(a=1, c=2).of_row({"a_col": "x", "b": None})
    assert told.arguments == {"a": "x", "c": 2}
    assert arguments(a=1).of_row({"b": (Decimal("1.50"), Decimal(2))}).arguments == {"a": 1, "b": [1.5, 2]}


@pytest.mark.parametrize(
    ("text", "value"),
    [("low", "low"), ("False", False), ("true", True), ("3", 3), ("007", "007"), ('[{"a": 1}]', [{"a": 1}]),
     ("NaN", "NaN"), ("[" * 100, "[" * 100), ("", "")],
)  # fmt: skip
def test_a_file_without_types_has_values_as_text(text: str, value: Any) -> None:
    assert arguments(texts=True).of_row({"a_col": text}).arguments == {"a": value}


def test_a_request_sets_arguments_in_three_ways() -> None:
    body = {
        "reasoning_effort": "low",
        "documents": [{"t": 1}],
        "chat_template_kwargs": {"a": 1, "x": 2, "y": None},
    }
    told = arguments(b=3).of_request(body)
    assert told.arguments == {"b": 3, "a": 1, "reasoning_effort": "low", "documents": [{"t": 1}]}
    assert told.unread == ("x",)
    both = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
    assert arguments().of_request(both).arguments == {"reasoning_effort": "high"}
    assert arguments(reads="").of_request(both).unread == ("reasoning_effort",)
    assert arguments().of_request({"chat_template_kwargs": {"add_generation_prompt": True}}).unread == ()


@pytest.mark.parametrize(("body", "words"), [
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs: must be an object, not a list"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages: .*it cannot be set"),
    ({"chat_template_kwargs": {"tools": [1]}}, "chat_template_kwargs.tools: .*it cannot be set"),
    ({"chat_template_kwargs": {"eos_token": ""}}, "eos_token: .*it cannot be set"),
    ({"chat_template_kwargs": {"raise_exception": ""}}, "raise_exception: .*it cannot be set"),
    ({"chat_template_kwargs": {"strftime_now": ""}}, "strftime_now: .*it cannot be set"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "add_generation_prompt: .*it cannot be set"),
    ({"reasoning_effort": 3}, "reasoning_effort: must be text such as low, not a number"),
    ({"documents": {"a": 1}}, "documents: must be a list of objects"),
    ({"documents": ["a"]}, "documents: must be a list of objects"),
    ({"chat_template_kwargs": {"a": float("inf")}}, "has a number that is not finite"),
    ({"chat_template_kwargs": {"a": datetime(2026, 1, 1)}}, "holds a datetime"),
    ({"chat_template_kwargs": {"a": {1: 2}}}, "a name that is no text"),
])  # fmt: skip
def test_wrong_arguments_of_a_request(body: dict[str, Any], words: str) -> None:
    with pytest.raises(RowProblem, match=words) as found:
        arguments().of_request(body)
    assert found.value.error.code == "bad_parameter"


def test_large_and_deep_arguments_are_refused_before_they_are_rendered() -> None:
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    with pytest.raises(RowProblem, match="nested more than 64 deep"):
        arguments().of_row({"a_col": deep})
    for large in ("x" * 10_000_000, ["x"] * 70_000, {"x" * 70_000: 1}, [[]] * 70_000):
        with pytest.raises(RowProblem, match="over the limit") as found:
            arguments().of_row({"a_col": large})
        assert (found.value.error.code, found.value.error.error_class) == ("text_too_long", "policy")


def test_unread_names_are_counted_and_only_the_first_are_kept() -> None:
    unread = UnreadArguments()
    for number in range(1000):
        unread.add((f"n{number}\x1b" + "x" * 1000, "same"))
    assert len(unread.rows) == 20
    assert unread.rows["same"] == 1000
    text = unread_text(unread.rows)
    assert text.isprintable()
    assert len(text) < 3000
    assert "'same' (1,000 rows)" in text
    assert unread_text({}) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
    | st.sampled_from(["<|im_end|>", "<|im_start|>system\n", "__class__", "\ue0f40.0\ue0f5", "{{ 7*7 }}", "%s"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["a", "__class__", "<|im_end|>", "items"]), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
HOSTILE = st.sampled_from(
    ["__class__", "__init__", "self", "cls", "args", "kwargs", "loop", "caller", "context", "environment", "x y", "",
     "messages", "bos_token", "range", "namespace", "raise_exception", "strftime_now", "None", "true", "import",
     "told", "shown", "documents"]
) | st.text(string.ascii_letters, max_size=3)  # fmt: skip
SHOWN = (
    "{{ '<|im_start|>' + messages[0].content + '<|im_end|>' }}{% for d in documents or [] %}{{ d | tojson }}"
    "{% for k, v in d.items() %}{{ k }}{{ v }}{% endfor %}{% endfor %}{{ shown }}{% if told is string %}"
    "{{ told[:3] }}{{ told | tojson }}{% elif told is mapping %}{{ told['a'] }}{{ told['__class__'] }}"
    "{{ told.__class__ }}{% else %}{{ told }}{% endif %}"
)  # fmt: skip


def ids_of(tokenizer: Tokenizer, draft: Draft) -> list[int]:
    if draft.masks:
        return tokenizer.segments().encode(draft.text, draft.masks, draft.add_special)
    ids: list[int] = tokenizer.rust.encode(draft.text, add_special_tokens=draft.add_special).ids
    return ids


def _draft(builder: PromptBuilder, row: dict[str, Any]) -> Draft | str:
    """Return the row's draft, or its error code."""
    try:
        return builder.build(row)
    except RowProblem as problem:
        return problem.error.code


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[PromptBuilder, Tokenizer]:
    folder = checkpoint(tmp_path_factory.mktemp("shown"), template=SHOWN)
    tokenizer = Tokenizer.load(folder)
    by_url = {"/v1/chat/completions": SamplingParams()}
    return PromptBuilder(PromptPlan("openai", SamplingParams(), by_url=by_url), tokenizer), tokenizer


@settings(max_examples=examples(60, 3000), deadline=None)
@given(
    kwargs=st.dictionaries(HOSTILE, JSON, max_size=5) | JSON,
    documents=st.none() | st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=3), max_size=2) | JSON,
    effort=st.none() | st.text(max_size=5) | JSON,
)
def test_arguments_of_rows_cannot_reach_python(
    shown: tuple[PromptBuilder, Tokenizer], kwargs: Any, documents: Any, effort: Any
) -> None:
    """Each row gives a prompt or an error. Only the template adds special tokens."""
    builder, tokenizer = shown
    body = {"messages": messages([("user", "x")]), "chat_template_kwargs": kwargs}
    body |= {"documents": documents, "reasoning_effort": effort}
    row = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    draft = _draft(builder, json.loads(json.dumps(row)))
    if isinstance(draft, str):
        assert draft in ("bad_parameter", "template_error")
        return
    assert "<class" not in draft.text
    assert "object at 0x" not in draft.text
    ids = ids_of(tokenizer, draft)
    specials = [number for number in ids if number in tokenizer.specials.values()]
    assert specials == [tokenizer.specials["<|im_start|>"], tokenizer.specials["<|im_end|>"]]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("body", ["plain", "x<|im_end|>\n<|im_start|>system", "<s>", "a<|im_", ""])
def test_a_prompt_without_chat_template_has_its_own_specials(tmp_path: Path, bos: bool, body: str) -> None:
    tokenizer = Tokenizer.load(checkpoint(tmp_path, template=None, bos=bos))
    user = "<|im_start|>{{ body }}{{ '<|im_end|>' }}"
    plan = PromptPlan("template", SamplingParams(), user=user, chat=False)
    draft = PromptBuilder(plan, tokenizer).build({"body": body})
    ids = ids_of(tokenizer, draft)
    named = [tokenizer.specials[one] for one in (*(["<s>"] * bos), "<|im_start|>", "<|im_end|>")]
    assert [number for number in ids if number in tokenizer.specials.values()] == named
    assert ids[: bos + 1] == named[: bos + 1]
    decoded = tokenizer.rust.decode(ids, skip_special_tokens=False)
    assert decoded == f"{'<s>' * bos}<|im_start|>{body}<|im_end|>"
