"""Distinguishes special tokens that a job's template writes from equal texts in rows."""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

from jinja2 import nodes

from batchinfer.input.tokenizer.masks import masks_for


class ResolvedPrompt(NamedTuple):
    """A rendered prompt that distinguishes special tokens of the template from equal texts in the row.

    Attributes:
        text: The prompt, in which a placeholder replaces each text of the row that looks like a special token.
        masks: The replaced text for each placeholder, or None without any.
    """

    text: str
    masks: dict[str, str] | None


class TemplateSpecials:
    """Distinguishes the special tokens that a template writes from equal texts in rows.

    Before rendering, `mark` replaces the special tokens in the template by random texts, which rows cannot contain.
    After rendering, `resolve` restores them.

    Args:
        pattern: Matches the special tokens of the checkpoint.
    """

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._secret = secrets.token_hex(16)
        self._marks: dict[str, str] = {}

    def mark(self, tree: nodes.Template) -> None:
        """Replace the special tokens in a parsed template, in place, by texts that `resolve` recognises."""
        for data in tree.find_all(nodes.TemplateData):
            data.data = self._mark_text(data.data)
        for constant in tree.find_all(nodes.Const):
            if isinstance(constant.value, str):
                constant.value = self._mark_text(constant.value)

    def resolve(self, text: str) -> ResolvedPrompt:
        """Restore the special tokens of the template in a rendered text, and replace equal texts of the row.

        Placeholders replace them; see Resolved.
        """
        if self._pattern.search(text) is None:
            return ResolvedPrompt(self._unmark_text(text), None)
        masks = masks_for(text, self._pattern)
        by_literal = {literal: mask for mask, literal in masks.items()}
        masked = self._pattern.sub(lambda match: by_literal[match.group(0)], text)
        return ResolvedPrompt(self._unmark_text(masked), masks)

    def _mark_text(self, text: str) -> str:
        return self._pattern.sub(lambda match: self._mark_of(match.group(0)), text)

    def _mark_of(self, literal: str) -> str:
        for mark, known in self._marks.items():
            if known == literal:
                return mark
        mark = f"\ue0f6{self._secret}.{len(self._marks)}\ue0f7"
        self._marks[mark] = literal
        return mark

    def _unmark_text(self, text: str) -> str:
        for mark, literal in self._marks.items():
            text = text.replace(mark, literal)
        return text
