"""The command `doctor`, which shows facts about this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from batchinfer.cli.options import Json
from batchinfer.cli.terminal import paint, say, say_json, tell
from batchinfer.core.errors import UsageError
from batchinfer.core.text import printable


def doctor(
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure this machine's peaks for reports, and on the CPU also step times for forecasts. Takes about "
            "a minute. Refused (exit code 75) while other processes use more than a fifth of a core.",
        ),
    ] = False,
    although_busy: Annotated[
        bool,
        typer.Option(
            "--although-busy",
            help="With `--measure`: measure even while other processes use the cores. The peaks are then too low.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show this machine's hardware, packages and measured peaks."""
    from batchinfer.machine.doctor import doctor as facts_of_machine
    from batchinfer.verbs.measure import measure_hardware

    if although_busy and not measure:
        raise UsageError("--although-busy has no effect without --measure; add --measure")
    if measure:
        tell("measuring matrix products, memory and steps of two small models, up to a minute ...")
        tell(printable(f"wrote {measure_hardware(although_busy, tell)}"))
    facts = facts_of_machine()
    if as_json:
        say_json({fact.name: fact.value for fact in facts})
        return
    width = max(len(fact.name) for fact in facts)
    for fact in facts:
        say(f"{paint(f'{fact.name:<{width}}', 'quiet')}  {printable(fact.value)}")
