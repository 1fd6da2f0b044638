"""Checks that a template can be compiled, and finds the line at fault."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from jinja2 import TemplateSyntaxError
from jinja2.sandbox import SandboxedEnvironment

MAX_CHARACTERS = 1 << 20  # the longest templates of public checkpoints have some 50,000
_TOO_DEEP = "nests too deeply to be compiled; take it apart with {% set %}"
_LIMITS = ("too many", "too deep", "nested")  # words in Python's messages about its limits on nesting
_OPEN, _CLOSE = frozenset("([{"), frozenset(")]}")
_BLOCKS = ("if", "for", "macro", "call", "filter", "with", "generation", "autoescape")


@dataclass(frozen=True, slots=True)
class TemplateFault:
    """The reason why a template cannot be compiled.

    Attributes:
        line: The number of the line at fault, from 1, or None if unknown.
        message: The rest of a sentence that begins with the template or the line, such as "has 9 characters".
    """

    line: int | None
    message: str

    def text(self, what: str) -> str:
        """Return the reason as a sentence for users. `what` names the template, such as "the chat template"."""
        return f"{what} {self.message}" if self.line is None else f"line {self.line} of {what} {self.message}"


def template_fault(environment: SandboxedEnvironment, source: str) -> TemplateFault | None:
    """Compile a Jinja template without rendering it. Return why it cannot be compiled, or None if it can.

    Args:
        environment: Jinja's environment.
        source: The text of the template.
    """
    if len(source) > MAX_CHARACTERS:
        return TemplateFault(None, f"has {len(source):,} characters; at most {MAX_CHARACTERS:,} are read")
    try:
        environment.from_string(source)
    except TemplateSyntaxError as error:
        return TemplateFault(error.lineno, f"is no valid Jinja template: {error.message}")
    except (RecursionError, MemoryError):
        return TemplateFault(_deepest_line(environment, source), _TOO_DEEP)
    except SyntaxError as error:  # in the Python code that Jinja generates
        if any(word in error.msg for word in _LIMITS):
            return TemplateFault(_deepest_line(environment, source), _TOO_DEEP)
        return TemplateFault(None, f"cannot be compiled: {error.msg}")
    except ValueError as error:  # a number with too many digits
        return TemplateFault(None, f"cannot be compiled: {error}")
    return None


def _deepest_line(environment: SandboxedEnvironment, source: str) -> int:
    depth, deepest, line = 0, 1, 0
    tokens: Counter[int] = Counter()
    previous = ""
    for at, kind, text in environment.lex(source):
        tokens[at] += kind not in ("whitespace", "data")
        if kind == "whitespace":
            continue
        begins = previous == "block_begin"
        if (begins and text in _BLOCKS) or (kind == "operator" and text in _OPEN):
            depth += 1
        elif (begins and text.startswith("end")) or (kind == "operator" and text in _CLOSE):
            depth -= 1
        if depth > deepest:
            deepest, line = depth, at
        previous = kind
    return line or tokens.most_common(1)[0][0]
