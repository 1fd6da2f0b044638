"""Stored answers become tool calls, and the text around the calls."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.core.reasoning import NO_MARKER
from batchinfer.core.tool_calls import CALL_STYLES, Call, CallStyle, CallStyleName
from batchinfer.input.tokenizer.reasoning_styles import find_reasoning
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.input.tool_calls.call_styles import find_call_style
from batchinfer.input.tool_calls.formats import FORMATS, HARMONY
from batchinfer.input.tool_calls.known_tools import KnownTools, known_tools
from batchinfer.store.outputs.answer_texts import AnswerReader
from batchinfer.store.outputs.call_column import CallingAnswer, call_column, split_calls
from batchinfer.store.outputs.reasoning_columns import SplitAnswer, StoredAnswer
from tests.checkpoints import kept_folder, make_tokenizer
from tests.examples import examples
from tests.tool_models import TOOL_FAMILIES, make_tool_tokenizer, written_calls

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"},
                       "least": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "unit": {"$ref": "#/$defs/Unit"},
                       "exact": {"type": "bool"}},
        "$defs": {"Unit": {"enum": [1, 2]}}}}},
    {"type": "function", "function": {"name": "files.read-1"}},
]  # fmt: skip
KNOWN = known_tools(TOOLS)
AS_TEXT = [name for name in TOOL_FAMILIES if name not in ("gpt-oss", "qwen3-coder")]


@cache
def family(name: str) -> tuple[Tokenizer, CallStyle]:
    folder = kept_folder()
    make_tool_tokenizer(folder, name)
    tokenizer = Tokenizer.load(folder)
    style = find_call_style("auto", tokenizer)
    assert style is not None
    return tokenizer, style


def told(
    name: str, text: str, tools: str | None = KNOWN, limit: int | None = None
) -> tuple[SplitAnswer, list[Call]]:
    """Return the text and the calls of an answer as a result has them."""
    tokenizer, style = family(name)
    ids = list(tokenizer.rust.encode(text, add_special_tokens=False).ids)
    reader = AnswerReader(find_reasoning("auto", tokenizer), style, tokenizer)
    one = CallingAnswer(StoredAnswer(ids, limit, NO_MARKER), b"key", tools, True)
    split, calls = split_calls([one], style, reader._split, tokenizer)
    return split[0], calls[0]


def plain(name: str, text: str) -> str:
    """Return the text of an answer without calls."""
    tokenizer, _ = family(name)
    return tokenizer.decode(tokenizer.rust.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_its_style_is_found(name: str) -> None:
    assert family(name)[1].name == TOOL_FAMILIES[name].style


def test_the_job_names_another_style_or_none(tmp_path: Path) -> None:
    tokenizer, _ = family("qwen3")
    assert find_call_style("none", tokenizer) is None
    assert find_call_style("llama3", tokenizer) == CallStyle("llama3", of_all=True)
    assert find_call_style("harmony", tokenizer) is None
    make_tokenizer(tmp_path)
    assert find_call_style("auto", Tokenizer.load(tmp_path)) is None
    assert {*FORMATS, HARMONY} == set(CALL_STYLES) == set(get_args(CallStyleName))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('ab é"\\\n{}[]<｜漢'), max_size=8)
    | st.sampled_from(["</tool_call>", "<tool_call>", "[TOOL_CALLS]", "<｜tool▁call▁end｜>", "```", "; "]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
arguments = st.dictionaries(st.sampled_from(["city", "days", "é"]), values, max_size=3).map(
    lambda found: json.dumps(found, ensure_ascii=False)
)
calls = st.lists(
    st.tuples(st.sampled_from(["get_weather", "files.read-1"]), arguments), min_size=1, max_size=3
)
words = st.text(st.sampled_from("ab é.\n漢🙂"), max_size=10)


@pytest.mark.parametrize("name", AS_TEXT)
@settings(max_examples=examples(10, 100))
@given(made=calls, before=words, behind=words)
def test_written_calls_are_read_back(
    name: str, made: list[tuple[str, str]], before: str, behind: str
) -> None:
    """Calls are equal character by character, and so is the text, except for adjacent white space."""
    style = family(name)[1].name
    text = written_calls(name, made)
    if style == "llama3":
        before, behind = "", ""
    if name == "mistral-v11":
        behind = ""
    split, found = told(name, before + text + behind)
    assert found == [Call(*one) for one in made]
    rest = "\n".join(part for part in (before.strip(), behind.strip()) if part)
    assert split.text == (rest or None)


@pytest.mark.parametrize("name", AS_TEXT)
@settings(max_examples=examples(10, 100))
@given(made=calls, data=st.data())
def test_truncated_calls_stay_text(name: str, made: list[tuple[str, str]], data: st.DataObject) -> None:
    """Complete calls are read, and the rest of the text is kept."""
    whole = written_calls(name, made)
    text = whole[: data.draw(st.integers(0, len(whole)))]
    split, found = told(name, text)
    assert found == [Call(*one) for one in made[: len(found)]]
    if not found:
        assert split.text == plain(name, text)
    elif len(found) < len(made):
        position = 0
        for tool, given_arguments in made[: len(found)]:
            position = text.index(given_arguments, text.index(tool, position)) + len(given_arguments)
        rest = plain(name, text[position:]).strip(' \n}];,"`')
        assert rest.strip() in (split.text or "") or rest.startswith(("<", "`"))


PIECES = [
    *'{}[]":,; \n', "\\", '{"name": "get_weather", ', '"arguments": {}', '"parameters": {"a": 1}', "}", "get_weather",
    "<tool_call>", "</tool_call>", "<|tool_call|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "NaN",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json\n", "\n```",
    "<function=get_weather>", "<parameter=city>", "</parameter>", "</function>", "\\ud800", "\ufffd", "[" * 3000,
    "<|channel|>", "<|message|>", "<|start|>", "<|call|>", "<|end|>", "commentary to=functions.get_weather ",
    "analysis", "9" * 5000, "1e999", "<function=get_weather>\n<parameter=city>\n", '{"name": [0, ', "{'a': ",
]  # fmt: skip


@pytest.mark.parametrize("name", TOOL_FAMILIES)
@settings(max_examples=examples(10, 100))
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=30), known=st.booleans())
def test_any_text_is_read_without_error(name: str, pieces: list[str], known: bool) -> None:
    """Calls have names and JSON objects. A text without calls is kept, except for an empty list."""
    text = "".join(pieces)
    split, found = told(name, text, KNOWN if known else None)
    for one in found:
        assert known
        assert one.name == "get_weather"
        assert isinstance(json.loads(one.arguments.replace("9" * 5000, "9")), dict)
        one.arguments.encode()
    if not found and name != "gpt-oss" and re.search(r"\[\s*\]", text) is None:
        assert split.text == plain(name, text) or split.reasoning is not None


@pytest.mark.parametrize(
    ("name", "text", "left", "made"),
    [
        ("qwen3", '<think>\n<tool_call>{"name": "f"}</tool_call></think>\n\nHi', "Hi", []),
        ("qwen3", '<think>x</think>\n\n<tool_call>{"name": "f"}</tool_call>', None, [("f", "{}")]),
        ("qwen3", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', None, [("f", '{"a": 1}')]),
        ("qwen3", '<tool_call>{"name": "f", "arguments": {"a": 1.10, "b": 1', None, None),
        ("qwen3", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, None),
        ("qwen3", '<tool_call>{"name": "f g"}</tool_call>', None, None),
        ("qwen3", '<tool_call>{"name": "f"} and so on', None, None),
        ("qwen3", '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', None, [("f", "{}"), ("g", "{}")]),
        ("qwen3", '<tool_call>{"no": 1}</tool_call><tool_call>{"name": "g"}</tool_call>',
         '<tool_call>{"no": 1}</tool_call>', [("g", "{}")]),
        ("granite", 'So: <tool_call>[{"name": "f"}] bye', "So:\nbye", [("f", "{}")]),
        ("llama3", '{"name": "other", "parameters": {}}', None, None),
        ("llama3", '{"name": "get_weather"}', None, None),
        ("llama3", 'Yes<|python_tag|>{"name": "get_weather", "parameters": {}}', "Yes", [("get_weather", "{}")]),
        ("llama3", '<|python_tag|>search.call(query="x")', None, None),
        ("mistral-v11", 'Hm[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}', "Hm", [("f", '{"a": 1}'), ("g", "{}")]),
        ("qwen3-coder", "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n"
         "<parameter=days>\n3\n</parameter>\n<parameter=x>\n[1, 2]\n</parameter>\n</function>\n</tool_call>", "I look.",
         [("get_weather", '{"city": "12", "days": 3, "x": [1, 2]}')]),
        ("qwen3-coder", "<tool_call>\n<function=get_weather>\n<parameter=days>\nmany\n</parameter>\n</function>\n"
         "</tool_call>", None, [("get_weather", '{"days": "many"}')]),
        ("qwen3-coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nUlm", None, None),
    ],
)  # fmt: skip
def test_single_answers(name: str, text: str, left: str | None, made: list[tuple[str, str]] | None) -> None:
    """`made` None: there are no calls, and the text is unchanged."""
    split, found = told(name, text)
    assert found == [Call(*one) for one in made or []]
    assert split.text == (plain(name, text) if made is None else left)


UNIT = "</parameter>\n</function>\n</tool_call>"
CITY = "<function=get_weather>\n<parameter=city>\nUlm\n"
ULM = [("get_weather", '{"city": "Ulm"}')]
CALL_JSON = '{"name": "get_weather", "parameters": {"city": "Ulm"}}'
DAYS = '{"name": "get_weather", "arguments": {"days": 3}}'
BOTH = [*ULM, ("get_weather", '{"days": 3}')]
OTHER = '{"name": "other", "parameters": {"city": "Ulm"}}'
FENCED = f"```json\n{CALL_JSON}\n```"


@pytest.mark.parametrize(
    ("name", "text", "left", "made"),
    [
        # JSON without a marker: in a fence, within text, as a list
        ("llama3", FENCED, None, ULM),
        ("llama3", f"I look it up.\n\n{FENCED}\nA moment.", "I look it up.\nA moment.", ULM),
        ("llama3", f"I call {CALL_JSON}.", "I call\n.", ULM),
        ("llama3", f"[{CALL_JSON}, {DAYS}]", None, BOTH),
        ("llama3", f"```\n{CALL_JSON}\n{DAYS}\n```", None, BOTH),
        ("llama3", f"First {CALL_JSON}; then {DAYS};", "First\n; then", BOTH),
        ("llama3", f"<|python_tag|>[{CALL_JSON}]", None, ULM),
        ("llama3", f"See {OTHER}: {CALL_JSON}", f"See {OTHER}:", ULM),
        ("granite", f"[{CALL_JSON}, {DAYS}]", None, BOTH),
        ("granite", f"I look.\n[{CALL_JSON}]", "I look.", ULM),
        ("granite", FENCED, None, ULM),
        # JSON that is no call: another name, no arguments, within other JSON, broken, in a list with something else
        *((name, text, None, None) for name in ("llama3", "granite") for text in (
            OTHER, f"Ask {OTHER} or so", f"[{OTHER}]", f"[{CALL_JSON}, {OTHER}]", '[{"name": "get_weather"}]',
            f'{{"example": {CALL_JSON}}}', "[]", "{}", "[see above]", CALL_JSON[:-1],
            '{"name": "get_weather", "parameters": "Ulm"}', f'"{CALL_JSON[1:-1]}"', f"```json\n{OTHER}\n```")),
        # a list without calls
        ("granite", "<|tool_call|>[]", None, []),
        ("granite", "No need.<|tool_call|>[ ]", "No need.", []),
        ("qwen3", "No need.<tool_call>[]</tool_call>", "No need.", []),
        ("mistral-v3", "[TOOL_CALLS] []", None, []),
        ("deepseek-v3.1", "No need.<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", "No need.", []),
        # tags that are left out
        ("qwen3-coder", f"I look.\n{CITY}{UNIT}", "I look.", ULM),
        ("qwen3-coder", f"{CITY}</parameter>\n</function>\nA moment.", "A moment.", ULM),
        ("qwen3-coder", f"<tool_call>\n{CITY}<parameter=days>\n3\n{UNIT}", None,
         [("get_weather", '{"city": "Ulm", "days": 3}')]),
        ("qwen3-coder", f"<tool_call>\n{CITY}</function>\n</tool_call>", None, ULM),
        ("qwen3-coder", f"<tool_call>\n{CITY}</parameter>\n</tool_call>", None, ULM),
        ("qwen3-coder", f"<tool_call>\n{CITY}</tool_call>", None, ULM),
        ("qwen3-coder", f"<tool_call>\n{CITY}</parameter>\n</function>\n{CITY}{UNIT}", None, ULM * 2),
        ("qwen3-coder", "<function=other>\n</function>", None, None),
        ("qwen3-coder", "Write <function=get_weather> first.", None, None),
        ("qwen3-coder", CITY, None, None),
        ("qwen3-coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\n</function> <parameter=x> a\n" + UNIT,
         None, [("get_weather", '{"city": "</function> <parameter=x> a"}')]),
        ("qwen3", f"<tool_call>{DAYS}<tool_call>{DAYS}</tool_call>", None, [BOTH[1]] * 2),
        ("deepseek-v3.1", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}"
         "<｜tool▁calls▁end｜>", None, [("f", "{}"), ("g", "{}")]),
        ("qwen3", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', None, [("f", "{}")]),
    ],
)  # fmt: skip
def test_malformed_calls_are_read_as_in_vllm_and_sglang(
    name: str, text: str, left: str | None, made: list[tuple[str, str]] | None
) -> None:
    """`made` None: there are no calls, and the text is unchanged."""
    test_single_answers(name, text, left, made)


@pytest.mark.parametrize(
    ("parameter", "value", "read"),
    [
        ("city", "null", "null"),
        ("city", "None", '"None"'),
        ("city", "{'a': 1}", '"{\'a\': 1}"'),
        ("unknown", "null", "null"),
        ("unknown", "12", '"12"'),
        ("unknown", "{'a': [True, None]}", '{"a": [true, null]}'),
        ("days", "null", "null"),
        ("days", "None", '"None"'),
        ("least", "1.50", "1.50"),
        ("least", "None", "null"),
        ("unit", "2", "2"),
        ("exact", "True", "true"),
        ("where", '{"a": 1}', '{"a": 1}'),
        ("where", "{'a': 'it\\'s \"x\"', 'b': (1)}", None),
        ("where", "{'a': 'it\\'s \"x\"', \"b\": [1.50, -2, ], 'c': False, }",
         '{"a": "it\'s \\"x\\"", "b": [1.50, -2], "c": false}'),
        ("where", "{'a': '\\x41\\ud83d\\ude00\\d', 'b': {}}", '{"a": "A\\ud83d\\ude00\\\\d", "b": {}}'),
        ("where", "{'a': '\\U00110000'}", None),
        ("where", "{'a': __import__('os')}", None),
        ("where", "{'a': 1", None),
        ("where", "{,}", None),
        ("where", "['a']", None),
        ("where", "{'a': " * 100 + "1" + "}" * 100, None),
    ],
)  # fmt: skip
def test_values_without_types_get_the_types_of_the_tool(parameter: str, value: str, read: str | None) -> None:
    """`read` None: the value is a text."""
    call = f"<tool_call>\n<function=get_weather>\n<parameter={parameter}>\n{value}\n{UNIT}"
    known = KnownTools.of(KNOWN)
    (found,) = FORMATS["qwen3-coder"](call, known).calls
    written = json.dumps(value, ensure_ascii=False) if read is None else read
    assert found.arguments == f'{{"{parameter}": {written}}}'
    json.loads(found.arguments)


@pytest.mark.parametrize(
    ("text", "made"),
    [(FENCED, ULM), (f"[{CALL_JSON}]", ULM), (f"Yes<|python_tag|>{CALL_JSON}", ULM), (f"I call {CALL_JSON}", []),
     (f"{CALL_JSON} it is", []), (f"Yes<|python_tag|>{CALL_JSON} it is", [])],
)  # fmt: skip
def test_calls_of_unlisted_tools_must_be_the_whole_answer(text: str, made: list[tuple[str, str]]) -> None:
    found = FORMATS["llama3"](text, None)
    assert found.calls == [Call(*one) for one in made]
    assert found.text == (text if not made else "Yes" if text.startswith("Yes") else None)


THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("text", "told_as"),
    [
        (THOUGHT + CALL + '{"city": "Ulm"}<|call|>', (None, "hm", [("get_weather", '{"city": "Ulm"}')])),
        (CALL + '{"city": "Ulm"}', (None, None, [("get_weather", '{"city": "Ulm"}')])),
        (THOUGHT + " to=functions.f<|channel|>commentary json<|message|>{}<|call|>", (None, "hm", [("f", "{}")])),
        (THOUGHT + "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL + "{}<|call|>",
         (None, "hm\nI look.", [("get_weather", "{}")])),
        (THOUGHT + CALL + "{}<|end|><|start|>assistant<|channel|>final<|message|>Done<|return|>",
         ("Done", "hm", [("get_weather", "{}")])),
        (THOUGHT + CALL + '{"city": "Ul', (None, 'hm\n{"city": "Ul', [])),
        (THOUGHT + "<|channel|>final<|message|>to=functions.f {}<|return|>", ("to=functions.f {}", "hm", [])),
    ],
)  # fmt: skip
def test_messages_to_functions(
    text: str, told_as: tuple[str | None, str | None, list[tuple[str, str]]]
) -> None:
    split, found = told("gpt-oss", text)
    assert (split.text, split.reasoning, found) == (*told_as[:2], [Call(*one) for one in told_as[2]])


def test_a_stop_string_truncates_the_text_with_its_tokens() -> None:
    """The store counts characters without special tokens."""
    name, call = "mistral-v3", '[TOOL_CALLS] [{"name": "f", "arguments": {}}]'
    text = f"Well {call} STOP"
    limit = len(plain(name, text)) - len(" STOP")
    assert told(name, text, limit=limit) == (SplitAnswer("Well", None, 0), [Call("f", "{}")])
    assert told(name, text, limit=limit - 1)[0].text == plain(name, text)[: limit - 1]


def test_rows_without_tools_have_no_calls_and_ids_are_deterministic() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert told("qwen3", text, tools=None) == (SplitAnswer(text, None, 0), [])
    answer = StoredAnswer([], None, NO_MARKER)
    rows = [
        CallingAnswer(answer, key, KNOWN, whole) for key, whole in ((b"a", True), (b"b", True), (b"a", False))
    ]
    made = [[Call("f", "{}"), Call("f", "{}")], [Call("f", "{}")], []]
    for style, length in (("hermes", 29), ("mistral", 9)):
        column = call_column(rows, made, CallStyle(style)).to_pylist()
        assert column[2] is None
        ids = [call["id"] for one in column[:2] for call in one]
        assert {len(one) for one in ids} == {length}
        assert len(set(ids)) == 3
        assert column == call_column(rows, made, CallStyle(style)).to_pylist()


def test_a_long_text_of_call_starts_is_read_in_linear_time() -> None:
    """Quadratic time would be minutes."""
    known = KnownTools.of(KNOWN)
    for read in FORMATS.values():
        for piece in PIECES:
            text = piece * (200_000 // len(piece))
            assert read(text, known).calls == []
