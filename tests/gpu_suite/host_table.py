"""The record's lines about host and memory: how steps were launched, what that took, and what is left of the memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from batchinfer.report.summary import launch_text

WIDTH = 58  # of the first column


def row(name: str, rest: str) -> str:
    return f"{name:<{WIDTH}} {rest}"


def duration(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs" if seconds < 1e-2 else f"{seconds * 1e3:,.1f} ms"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def launch_lines(result: dict[str, Any]) -> Iterator[str]:
    """In which ways what share of its steps was launched, where steps were timed."""
    if "wall_s" in result or result.get("host") is not None:
        yield from (f"  {text}" for text in [launch_text(result["launched"])] if text is not None)


def mixed_lines(result: dict[str, Any]) -> Iterator[str]:
    """A step both ways."""
    name = f"{result['tokens']} tokens of prompts, {result['rows']} rows, {result['model']}"
    ways = {way: times for way, times in result["ways"].items() if times is not None}
    if not ways:
        yield row(name, f"{' and '.join(result['ways'])}: right to {result['error']:.1g}")
        return
    assumed = dict(zip(ways, result["assumed_layer_s"], strict=True))
    for way, times in ways.items():
        host = f"the host {duration(times['host_s'])}, {duration(times['host_layer_s'])} a layer"
        told = f"{way} the device {duration(times['median_s'])}, {host} (assumed {duration(assumed[way])})"
        yield row(name, told)
        name = ""


def host_lines(result: dict[str, Any]) -> Iterator[str]:
    """The host's times in a steady state."""
    name = f"the host in {'pieces' if result['in_pieces'] else 'operators'}, {result['model']}"
    host = result["host"]
    if host is None:
        yield row(name, f"ran in {result['steps']} steps")
        return
    for way, found in host["ways"].items():
        told = f"{found['steps']} steps of {found['tokens']:.0f} tokens as {way.replace('_', ' ')}"
        taken = f"launched in {duration(found['launch_s'])}, {duration(found['launch_layer_s'])} a layer"
        yield row(name, f"{told}: {taken}; a step {duration(found['step_s'])}")
        name = ""
    for which, found in host["admission"].items():
        if found["steps"]:
            who = f"{found['rows']:.0f} rows admitted" if which == "admitting" else "none admitted"
            taken = f"scheduled in {duration(found['schedule_s'])}, {duration(found['most_s'])} at most"
            yield row("", f"{found['steps']} steps, {who}: {taken}")
    yield from launch_lines(result)


def memory_lines(result: dict[str, Any]) -> Iterator[str]:
    """What the reserve was needed for."""
    name = f"memory, {result['model']}"
    if "left_bytes" not in result:
        yield row(name, "asked for")
        return
    mib = {key: f"{value / 2**20:,.0f} MiB" for key, value in result.items() if key.endswith("_bytes")}
    taken = f"weights {mib['weight_bytes']}, steps {mib['step_bytes']}, cache {mib['cache_bytes']}"
    kept = f"kept back {mib['kept_back_bytes']} (the reserve is {mib['reserve_bytes']})"
    yield row(name, f"{taken}; {kept}, of which {mib['unforeseen_bytes']} were needed")
