"""Renders conversations with a chat template, and turns its errors into row problems."""

from __future__ import annotations

from jinja2 import nodes

from batchinfer.input.prompts.arguments.template_arguments import Arguments
from batchinfer.input.prompts.chat_shapes import ChatShapes
from batchinfer.input.prompts.chat_template import ChatTemplate, Message
from batchinfer.input.prompts.turns.call_turns import CallTurns
from batchinfer.input.rows import RowProblem

# Learning a shape takes about ten renderings, so shapes are only learnt for arguments that many rows may share
_MOST_ARGUMENT_SETS = 16
_SHORT = 64  # maximum characters of an argument that rows may share

ArgumentsKey = tuple[tuple[str, str], ...]


class Chat:
    """Renders conversations with a chat template.

    Conversations with the same arguments and roles take a fast path: ChatShapes inserts their contents into an earlier
    rendering.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._calls = CallTurns(template.render)
        self._shapes: dict[ArgumentsKey, ChatShapes] = {}
        self._literals = {c.value for c in template.tree().find_all(nodes.Const) if isinstance(c.value, str)}

    def render(self, messages: list[Message], arguments: Arguments) -> str:
        """Render a conversation, and return the text of the prompt.

        Args:
            messages: The messages of the conversation.
            arguments: The arguments of the chat template by name.

        Raises:
            RowProblem: The template fails.
        """
        try:
            return self._rendered(self._calls.format(messages), arguments)
        except RowProblem:
            raise
        except MemoryError:
            raise RowProblem(
                "template_memory", "the chat template asks for too much memory", "resource"
            ) from None
        except Exception as error:  # noqa: BLE001 - a checkpoint's template may raise anything
            # A literal of the template is safe to show; another text may quote the messages
            reason = str(error) if str(error) in self._literals else type(error).__name__
            raise RowProblem("template_error", f"the chat template refused: {reason}") from None

    def _rendered(self, messages: list[Message], arguments: Arguments) -> str:
        key = _key(arguments)
        shapes = None if key is None else self._shapes.get(key)
        if shapes is not None:
            return shapes.render(messages)
        template = self._template.with_arguments(arguments)
        if key is None or len(self._shapes) >= _MOST_ARGUMENT_SETS:
            return template.render(messages)
        self._shapes[key] = shapes = ChatShapes(template)
        return shapes.render(messages)


def _key(arguments: Arguments) -> ArgumentsKey | None:
    # Equal keys mean equal prompts: 1 and true have different keys. None: an argument is large or not a plain value.
    for value in arguments.values():
        if not isinstance(value, str | bool | int | float) or (
            isinstance(value, str) and len(value) > _SHORT
        ):
            return None
    return tuple((name, repr(value)) for name, value in sorted(arguments.items()))
