"""A chat template at work: messages and arguments in, text out, and its refusals as row problems."""

from __future__ import annotations

from jinja2 import nodes

from batchinfer.input.prompts.arguments.told import Arguments
from batchinfer.input.prompts.chat_shapes import ChatShapes
from batchinfer.input.prompts.chat_template import ChatTemplate, Message
from batchinfer.input.prompts.turns.call_turns import CallTurns
from batchinfer.input.rows import RowProblem

# Learning a shape renders it some ten times, so only arguments that many rows may have in common are worth it
_MOST_TOLD = 16
_SHORT = 64  # characters

ArgumentsKey = tuple[tuple[str, str], ...]


class Chat:
    """Renders conversations through a chat template, by the shortcut for each set of arguments that rows share."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._calls = CallTurns(template.render)
        self._told: dict[ArgumentsKey, ChatShapes] = {}
        self._literals = {c.value for c in template.tree().find_all(nodes.Const) if isinstance(c.value, str)}

    def render(self, messages: list[Message], arguments: Arguments) -> str:
        """The prompt's text. Raises RowProblem."""
        try:
            return self._rendered(self._calls.formed(messages), arguments)
        except RowProblem:
            raise
        except MemoryError:
            raise RowProblem(
                "template_memory", "the chat template asks for too much memory", "resource"
            ) from None
        except Exception as error:  # noqa: BLE001 - a checkpoint's template may raise anything
            # A sentence that stands in the template itself is safe to show; others may quote the messages.
            known = str(error) if str(error) in self._literals else type(error).__name__
            raise RowProblem("template_error", f"the chat template refused: {known}") from None

    def _rendered(self, messages: list[Message], arguments: Arguments) -> str:
        key = _key(arguments)
        shapes = None if key is None else self._told.get(key)
        if shapes is not None:
            return shapes.render(messages)
        template = self._template.told(arguments)
        if key is None or len(self._told) >= _MOST_TOLD:
            return template.render(messages)
        self._told[key] = shapes = ChatShapes(template)
        return shapes.render(messages)


def _key(arguments: Arguments) -> ArgumentsKey | None:
    """Equal for arguments that no template can tell apart, as it can 1 and true. None for large ones."""
    for value in arguments.values():
        if not isinstance(value, str | bool | int | float) or (
            isinstance(value, str) and len(value) > _SHORT
        ):
            return None
    return tuple((name, repr(value)) for name, value in sorted(arguments.items()))
