from __future__ import annotations

import json
import pickle
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest

from batchinfer.machine import facts, hardware
from batchinfer.machine.facts import MachineFacts, this_machine
from batchinfer.machine.hardware import Gpu, Hardware, hardware_by_name
from batchinfer_kernels.tiles import Grant
from tests.settings import has_gpus

H100, T4 = Gpu("NVIDIA H100 80GB HBM3", 80 << 30), Gpu("NVIDIA T4", 16 << 30)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Report three H100 and one T4; return the driver queries that were made."""
    asked: list[str] = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(facts, "version", lambda package: "2.9.0")
    monkeypatch.setattr(facts, "nvidia_gpus", lambda: asked.append("names") or [H100, H100, H100, T4])
    monkeypatch.setattr(hardware, "_output", lambda command: asked.append("capabilities") or "")
    return asked


def test_a_description_can_be_sent() -> None:
    for machine in (
        this_machine("cpu"),
        MachineFacts(hardware_by_name("h100"), gpus=("0", "GPU-1"), capability=(9, 0)),
    ):
        assert pickle.loads(pickle.dumps(machine)) == machine
        sent = json.loads(json.dumps(asdict(machine)))
        lists = {name: tuple(value) for name, value in sent.items() if isinstance(value, list)}
        assert MachineFacts(**sent | lists | {"hardware": Hardware(**sent["hardware"])}) == machine


@pytest.mark.parametrize(
    ("asked", "visible", "names", "several"),
    [
        ("auto", None, ("0", "1", "2"), False),  # the T4 differs from the first one
        ("cuda", None, ("0", "1", "2"), False),
        ("auto", "3,1", ("3", "1"), True),
        ("auto", "GPU-a,GPU-b,-1,GPU-c", ("GPU-a", "GPU-b"), True),
        ("auto", "2", ("2",), True),
        ("auto", "", (), True),
        ("cpu", None, None, False),
    ],
)
def test_gpus_that_a_job_may_use_are_found(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch,
    asked: Any, visible: str | None, names: tuple[str, ...] | None, several: bool,
) -> None:  # fmt: skip
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = this_machine(asked)
    assert (found.gpus, found.several_kinds) == (names, several)
    assert found.hardware.name == ("NVIDIA H100 80GB HBM3" if names is not None else found.hardware.name)
    assert (found.device, found.tiles and asked != "cpu") == ("cpu" if names is None else "cuda", False)
    assert gpus == ([] if asked == "cpu" else ["names", "capabilities"]), "once each, and not for a CPU"


def test_a_torch_without_cuda_means_the_cpu(gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "version", lambda package: "2.9.0+cpu")
    found = this_machine("auto")
    assert (found.device, found.torch_has_cuda, gpus) == ("cpu", False, [])
    assert this_machine("cuda").device == "cuda", "which a check refuses"


def test_a_gpu_that_the_driver_does_not_list_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "nvidia_gpus", list)
    has_gpus(monkeypatch)
    found = this_machine("cuda")
    assert (found.hardware.name, found.has_gpu, found.devices) == ("unknown GPU", True, 1)


def test_tiles_are_those_that_the_system_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (False, True):
        monkeypatch.setattr(facts, "tile_grant", partial(Grant, given))
        assert this_machine("cpu").tiles is given


@pytest.mark.parametrize(("arm", "fast", "dtype", "sums"), [
    (True, True, "bfloat16", "bfdot"),
    (True, True, "float32", "neon"),
    (True, False, "bfloat16", "neon"),
    (False, True, "bfloat16", ""),
])  # fmt: skip
def test_an_arm_cpu_adds_up_in_its_own_way(arm: bool, fast: bool, dtype: str, sums: str) -> None:
    machine = MachineFacts(Hardware("a CPU", "cpu", 2, None), fast_bf16=fast, arm=arm)
    assert machine.arm_sums(dtype) == sums
    assert MachineFacts(hardware_by_name("h100"), fast_bf16=fast, arm=arm).arm_sums(dtype) == ""


@pytest.mark.parametrize(("said", "names", "can"), [
    (["8.9"], "0", True),
    (["9.0", "10.0"], "0,1", True),
    (["8.0"], "0", False),
    (["9.0", "8.6"], "0,1", False),
    (["9.0", "8.6"], "0", True),
    (["9.0", "8.6"], "GPU-1", False),
    (["9.0", "8.6"], "MIG-1", False),
    ([], "", None),
    (["[N/A]"], "0", False),
])  # fmt: skip
def test_the_driver_says_whether_the_gpus_that_are_used_multiply_fp8(
    monkeypatch: pytest.MonkeyPatch, said: list[str], names: str, can: bool | None
) -> None:
    """This holds even if the peaks of the first GPU differ. A remote machine has no other facts."""
    lines = "\n".join(f"{number}, GPU-{number}a, {each}" for number, each in enumerate(said))
    monkeypatch.setattr(hardware, "_output", lambda _: lines)
    found = hardware.min_capability(names.split(","))
    for known, elsewhere in (
        (hardware_by_name("h100"), True),
        (Hardware("NVIDIA X", "cuda", None, None), False),
    ):
        assert MachineFacts(known).multiplies_fp8 is elsewhere
        assert MachineFacts(known, capability=found).multiplies_fp8 is (elsewhere if can is None else can)
