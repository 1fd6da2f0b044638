"""Why a model cannot run through transformers' code. No torch."""

from __future__ import annotations


class CannotRun(Exception):
    """A model that would not be computed right, or not at all: the `reason`, which others share, and what is special
    about this one."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason, self.detail = reason, detail
