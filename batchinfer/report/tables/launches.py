"""How many steps, and how many tokens in them, a GPU's host launched in which way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchinfer.core.samples import LAUNCH_MODES, LaunchMode
from batchinfer.core.units import percent

_SAID: dict[LaunchMode, str] = {
    "full_graph": "as one graph",
    "piecewise_graph": "as graphs of pieces",
    "eager": "an operator at a time",
}


def launch_text(row: Mapping[str, Any], prefix: str = "") -> str | None:
    """In which ways what share of the steps is launched, as a line says it; `row` has their numbers by the run table's
    names. None where they are not known."""
    steps = {mode: row.get(f"{prefix}{mode}_steps") for mode in LAUNCH_MODES}
    known = {mode: number for mode, number in steps.items() if number is not None}
    whole = sum(known.values())
    if not whole:
        return None
    return "steps launched " + ", ".join(f"{_SAID[mode]} {percent(n / whole)}" for mode, n in known.items())


def _zeros() -> dict[LaunchMode, int]:
    return dict.fromkeys(LAUNCH_MODES, 0)


@dataclass(slots=True)
class LaunchCounts:
    """Sums over steps; nothing is known as long as no step says how it was launched, as none does on a CPU."""

    steps: dict[LaunchMode, int] = field(default_factory=_zeros)
    tokens: dict[LaunchMode, int] = field(default_factory=_zeros)  # run, recomputed ones included

    def add(self, mode: LaunchMode | None, tokens: int, steps: int = 1) -> None:
        """Count steps that ran so many tokens."""
        if mode is not None:
            self.steps[mode] += steps
            self.tokens[mode] += tokens

    def columns(self) -> dict[str, int | float | None]:
        """Numbers and shares by the run table's names; all None where nothing is known."""
        found: dict[str, int | float | None] = {}
        for unit, counts in (("steps", self.steps), ("tokens", self.tokens)):
            whole = sum(counts.values())
            for mode, number in counts.items():
                found[f"{mode}_{unit}"] = number if whole else None
                found[f"{mode}_{unit}_share"] = number / whole if whole else None
        return found
