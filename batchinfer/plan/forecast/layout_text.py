"""The layouts of a job on several devices, as people read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchinfer.core.wording import percent, seconds, size
from batchinfer.machine.devices import Devices
from batchinfer.plan.forecast.layouts import LayoutForecast

MOST_REFUSED = 4  # that are told, each with its reason


def layout_lines(layouts: Sequence[LayoutForecast], devices: Devices) -> Iterator[tuple[str, str]]:
    """Yield the lines: the devices, each layout that fits, the chosen one first, and why others are refused."""
    yield (
        "layouts",
        f"{devices.name}, {devices.links}; expected, and never run on a GPU; bytes are those of a device",
    )
    for layout in layouts:
        if layout.refused is None:
            yield "", _fitting(layout)
    refused = [layout for layout in layouts if layout.refused is not None]
    for layout in refused[:MOST_REFUSED]:
        yield "", f"{layout.name}: {layout.refused}"
    if len(refused) > MOST_REFUSED:
        names = "; ".join(layout.name for layout in refused[MOST_REFUSED:])
        yield "", f"refused, too: {names}"
    if layouts[0].chosen:
        asked = ", ".join(f"{name}: {value}" for name, value in layouts[0].options.items())
        yield "", f"the chosen one: engine: {{{asked}}}"


def _fitting(layout: LayoutForecast) -> str:
    told = [] if layout.seconds is None else [seconds(layout.seconds)]
    told.append(f"weights {size(layout.weight_bytes or 0)}, KV cache {size(layout.kv_bytes or 0)}")
    if layout.waits is not None:
        told.append(f"stages wait {percent(layout.waits)} of the time")
    if layout.imbalance is not None:
        told.append(f"its fullest rank of experts has {layout.imbalance:.2f} times the mean's tokens")
    if layout.not_run is not None:
        told.append(f"not offered: {layout.not_run}")
    if layout.seconds is not None and not layout.simulated:
        told.append("estimated")
    chosen = "chosen, the fastest that runs: " if layout.chosen else ""
    return f"{chosen}{layout.name}: {', '.join(told)}"
