"""A fast path for templates that only print columns between texts: they are joined without running Jinja.

Jinja takes a large part of the time for reading a short row, see docs/measurements/ingest.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from jinja2 import nodes

from batchinfer.input.rows import Values

# Names with a special meaning in templates
_SPECIAL = frozenset(
    {"row", "self", "super", "loop", "caller", "varargs", "kwargs", "context", "environment"}
)


@dataclass(frozen=True, slots=True)
class SimpleTemplate:
    """A template of texts with columns between them, such as `{{ name }}`, and nothing else.

    It is rendered without Jinja.

    Attributes:
        texts: The texts before, between and after the columns.
        names: The columns. There is one column fewer than texts.
    """

    texts: tuple[str, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, tree: nodes.Template) -> Self | None:
        """Convert a parsed Jinja template.

        Return None if it has more than texts and printed columns, such as a filter.
        """
        texts, names = [""], []
        for node in _parts(tree):
            if isinstance(node, nodes.TemplateData):
                texts[-1] += node.data
            elif isinstance(node, nodes.Name) and node.ctx == "load" and node.name not in _SPECIAL:
                names.append(node.name)
                texts.append("")
            else:
                return None
        return cls(tuple(texts), tuple(names))

    def render(self, values: Values) -> str | None:
        """Return the text of a row. None if only Jinja can render it: a value is missing, null, a list or an object."""
        parts = [self.texts[0]]
        for name, text in zip(self.names, self.texts[1:], strict=True):
            value = values.get(name)
            if type(value) is not str:
                if type(value) not in (int, float, bool):
                    return None
                value = str(value)
            parts += (value, text)
        return "".join(parts)


def _parts(tree: nodes.Template) -> Iterator[nodes.Node]:
    for node in tree.body:
        if isinstance(node, nodes.Output):
            yield from node.nodes
        else:
            yield node
