"""A fast path for chat templates: render once per sequence of roles, then insert other contents.

The template is rendered once with contents of type `ContentPlaceholder`, which record what it does with them. Printing,
joining and stripping are replayed for other contents. Each question of the template about a content ("does it start
with <tool>?") becomes a guard: other contents must get the same answer. Any other operation disables the fast path. The
result is compared with real renderings of unusual contents before it is used, so it always equals the template's.

It reduces the CPU time of reading 20,000 short chats of two messages with Qwen3's template from 133 to 109 µs per
row (Zen 4).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes

from batchinfer.input.prompts.chat_template import ChatTemplate, Message

_MAX_SHAPES = 256
_STAND_IN = re.compile("\ue0f2([0-9]+)\ue0f3")
_PROBES = ("x", " two words ", "\n{{ a }}\n\n", "{% b %}", "", "<b>&amp;\"'</b>", "\té漢🙂\r\n", "\\n \u2028")
# These may change a content without calling a method of `ContentPlaceholder`
_UNWATCHED = (nodes.Concat, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)
_UNWATCHED_METHODS = {"join", "format", "format_map", "replace"}
_WATCHED_FILTERS = {"trim", "length", "count", "list", "first", "last", "string", "default", "d"}

Op = tuple[str, tuple[Any, ...]]


class Untraceable(Exception):
    """Raised if a chat template uses the content of a message in a way that Traced cannot record."""


@dataclass(frozen=True, slots=True)
class Guard:
    """A question that a chat template asked about a message content while it was recorded, and the answer.

    For example, a template may ask if a content starts with <tool>. The recorded rendering is only valid for other
    contents with the same answer.

    Args:
        index: The number of the message, from 0.
        path: The string operations that the template applied to the content before the question, such as strip.
        question: The method of str that the template called, and its arguments.
        answer: The result of the method.
    """

    index: int
    path: tuple[Op, ...]
    question: Op
    answer: bool

    def holds(self, contents: Sequence[str]) -> bool:
        """Return True if the question has the recorded answer for other contents.

        Args:
            contents: The content of each message.
        """
        name, args = self.question
        value = _follow(contents[self.index], self.path)
        found = bool(value) if name == "bool" else bool(getattr(value, name)(*args))
        return found is self.answer


def _follow(content: str, path: tuple[Op, ...]) -> str:
    for name, args in path:
        content = getattr(content, name)(*args)
    return content


class ContentTrace:
    """A record of how a chat template used the contents of messages, while it rendered placeholders in their place.

    Attributes:
        origins: Per placeholder, the number of its message and the string operations that the template applied.
        guards: The questions that the template asked about contents.
    """

    def __init__(self) -> None:
        self.origins: list[tuple[int, tuple[Op, ...]]] = []
        self.guards: list[Guard] = []

    def placeholder(self, index: int, path: tuple[Op, ...]) -> ContentPlaceholder:
        """Return a new placeholder for the content of a message.

        Args:
            index: The number of the message, from 0.
            path: The string operations that the template has applied to the content.
        """
        self.origins.append((index, path))
        return ContentPlaceholder(f"\ue0f2{len(self.origins) - 1}\ue0f3", self, index, path)


class _Opaque(str):
    def __add__(self, other: str) -> _Opaque:
        return _Opaque(str.__add__(self, other))

    def __radd__(self, other: str) -> _Opaque:
        return _Opaque(str.__add__(other, self))

    def __str__(self) -> str:
        return self

    __hash__ = None  # type: ignore[assignment]


class ContentPlaceholder(_Opaque):
    """A placeholder for the content of a message. It records the operations that a chat template applies to it."""

    _trace: ContentTrace
    _index: int
    _path: tuple[Op, ...]

    # Not in __init__, which Python would call again for `str(stand_in)`
    def __new__(cls, text: str, trace: ContentTrace, index: int, path: tuple[Op, ...]) -> ContentPlaceholder:
        """Create a placeholder that prints as `text`; `ContentTrace.placeholder` explains the other arguments."""
        self = super().__new__(cls, text)
        self._trace, self._index, self._path = trace, index, path
        return self

    def __init__(self, *_: Any) -> None:
        """Do nothing: `__new__` sets all attributes."""

    def _ask(self, name: str, *args: Any) -> bool:
        if not all(type(a) is str or (type(a) is tuple and set(map(type, a)) == {str}) for a in args):
            raise Untraceable
        # The answer for ordinary contents; contents with another answer are rendered by the template
        answer = name in ("__ne__", "bool")
        self._trace.guards.append(Guard(self._index, self._path, (name, args), answer))
        return answer

    def _derive(self, name: str, *args: Any) -> ContentPlaceholder:
        return self._trace.placeholder(self._index, (*self._path, (name, args)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self._ask("__eq__", other)

    def __ne__(self, other: object) -> bool:
        return not isinstance(other, str) or self._ask("__ne__", other)

    def __contains__(self, part: object) -> bool:
        return self._ask("__contains__", part)

    def __bool__(self) -> bool:
        return self._ask("bool")

    def startswith(self, *args: Any) -> bool:
        """Record this question of the template about the content, and return False, the answer for most contents."""
        return self._ask("startswith", *args)

    def endswith(self, *args: Any) -> bool:
        """Record this question of the template about the content, and return False, the answer for most contents."""
        return self._ask("endswith", *args)

    def strip(self, chars: str | None = None, /) -> ContentPlaceholder:
        """Return a new placeholder: for the content without white space, or the characters `chars`, at both ends."""
        return self._derive("strip", chars)

    def lstrip(self, chars: str | None = None, /) -> ContentPlaceholder:
        """Return a new placeholder: for the content without white space, or the characters `chars`, at its start."""
        return self._derive("lstrip", chars)

    def rstrip(self, chars: str | None = None, /) -> ContentPlaceholder:
        """Return a new placeholder: for the content without white space, or the characters `chars`, at its end."""
        return self._derive("rstrip", chars)

    __hash__ = None


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise Untraceable


def _close(kind: type) -> None:
    # All methods of str raise Untraceable, except methods that the subclass or every object defines
    needed = set(vars(object)) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__format__"}
    for name in set(vars(str)) - needed - {"__add__", "__hash__"}:
        setattr(kind, name, _refuse)
    setattr(kind, "__bool__", _refuse)  # noqa: B010 - str has no __bool__; Python uses its length


_close(_Opaque)


@dataclass(frozen=True, slots=True)
class Shape:
    """A recorded rendering of a chat template for one sequence of roles, into which other contents can be inserted.

    Args:
        literals: The texts before, between and after the contents.
        slots: For each gap between two literals: the number of the message, and the string operations to apply to its
            content.
        guards: The conditions that other contents must meet.
    """

    literals: tuple[str, ...]
    slots: tuple[tuple[int, tuple[Op, ...]], ...]
    guards: tuple[Guard, ...]

    def fill(self, contents: Sequence[str]) -> str | None:
        """Return the rendered text with other contents. None if the rendering is not valid for them.

        Args:
            contents: The content of each message.
        """
        if not all(guard.holds(contents) for guard in self.guards):
            return None
        out = [self.literals[0]]
        for (index, path), literal in zip(self.slots, self.literals[1:], strict=True):
            out += (_follow(contents[index], path) if path else contents[index], literal)
        return "".join(out)


class ChatShapes:
    """Renders conversations with a chat template, faster than the template itself.

    A template is rendered once per sequence of roles. For other conversations with these roles, contents are inserted
    into the recorded text if the result is certainly equal.

    Attributes:
        shortcuts: The number of conversations that were not rendered by the template.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._shapes: dict[tuple[str, ...], Shape | None] = {}
        self._usable = _watchable(template.tree())
        self.shortcuts = 0

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text of a conversation, exactly as `template.render(messages)` does."""
        shape = self._shape(messages) if self._usable and all(map(_is_plain, messages)) else None
        text = shape.fill([m["content"] for m in messages]) if shape is not None else None
        if text is None:
            return self._template.render(messages)
        self.shortcuts += 1
        return text

    def _shape(self, messages: Sequence[Message]) -> Shape | None:
        roles = tuple(m["role"] for m in messages)
        if roles not in self._shapes:
            if len(self._shapes) >= _MAX_SHAPES:
                return None
            self._shapes[roles] = self._learn(roles)
        return self._shapes[roles]

    def _learn(self, roles: tuple[str, ...]) -> Shape | None:
        try:
            shape = _traced(self._template.render, roles)
            exact = all(self._agrees(shape, roles, shift) for shift in range(len(_PROBES)))
        except (Untraceable, jinja2.TemplateError, TypeError, ValueError, AttributeError):
            return None  # if the template is wrong, rendering the rows reports it
        return shape if exact else None

    def _agrees(self, shape: Shape, roles: tuple[str, ...], shift: int) -> bool:
        contents = [_PROBES[(shift + i) % len(_PROBES)] for i in range(len(roles))]
        text = shape.fill(contents)
        return text is None or text == self._template.render(_messages(roles, contents))


def _traced(render: Callable[[list[Message]], str], roles: tuple[str, ...]) -> Shape:
    trace = ContentTrace()
    text = render(_messages(roles, [trace.placeholder(i, ()) for i in range(len(roles))]))
    pieces = _STAND_IN.split(str.__str__(text))
    slots = tuple(trace.origins[int(number)] for number in pieces[1::2])
    return Shape(tuple(pieces[::2]), slots, tuple(dict.fromkeys(trace.guards)))


def _messages(roles: Sequence[str], contents: Sequence[str]) -> list[Message]:
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]


def _is_plain(message: Message) -> bool:
    return len(message) == 2 and type(message.get("content")) is str and "role" in message


def _watchable(tree: nodes.Template) -> bool:
    if any(True for _ in tree.find_all(_UNWATCHED)):
        return False
    if any(a.attr in _UNWATCHED_METHODS for a in tree.find_all(nodes.Getattr)):
        return False
    return all(f.name in _WATCHED_FILTERS for f in tree.find_all(nodes.Filter))
