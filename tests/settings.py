"""Settings of jobs, and descriptions of machines."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from batchinfer.machine import facts
from batchinfer.machine.facts import MachineFacts
from batchinfer.machine.hardware import Hardware
from batchinfer.plan.setup.numerics import Numerics
from batchinfer.plan.setup.placement import Placement
from batchinfer.plan.setup.setting import Setting


def setting_of(
    hardware: Hardware, dtype: Any = "bfloat16", max_model_len: int = 512, **changes: Any
) -> Setting:
    """Return the setting of a job on this hardware.

    Args:
        changes: fields as in `changed`.
    """
    machine = MachineFacts(hardware)
    return changed(Setting(Numerics(hardware.device, dtype, max_model_len), Placement(machine)), **changes)


def changed(setting: Any, **changes: Any) -> Any:
    """Return a setting with other values of these fields, in any of its parts."""
    for name, value in changes.items():
        own = {field.name for field in fields(setting)}
        if name in own:
            setting = replace(setting, **{name: value})
            continue
        parts = (part for part in ("numerics", "placement", "parts", "machine") if part in own)
        part = next(part for part in parts if _has(getattr(setting, part), name))
        setting = replace(setting, **{part: changed(getattr(setting, part), **{name: value})})
    return setting


def _has(part: Any, name: str) -> bool:
    names = {field.name for field in fields(part)}
    return name in names or ("machine" in names and _has(part.machine, name))


def has_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """Make jobs find this number of cores."""
    monkeypatch.setattr(facts, "usable_cpus", lambda: cores)


def has_gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make jobs find these GPUs, and a torch that can use them. Without names, this machine's GPUs count."""
    monkeypatch.setattr(facts, "version", lambda package: "2.9.0")
    monkeypatch.setattr(facts, "_has_gpu_files", lambda: True)
    if names:
        monkeypatch.setattr(facts, "usable_gpus", lambda found: names)
