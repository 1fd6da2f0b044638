"""Tests whether a CPU's operators use matrix tiles: if the job allows it, and as planned with exact bits."""

from __future__ import annotations

import logging

import pytest
import torch

from batchinfer.core.errors import Unavailable
from batchinfer.machine import doctor
from batchinfer.models.ops import choose
from batchinfer.models.ops.choose import choose_ops
from batchinfer_kernels.arithmetic import WeightForm
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.tiles import Grant, TileWay

CPU = torch.device("cpu")
REFUSED = Grant(False, "the system refuses the state of AMX tiles (arch_prctl: Operation not permitted)")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """A machine that grants matrix tiles or not, with tiles in C, and a compiler that knows them or not."""

    def grants(grant: Grant, *, compiled: bool = True) -> None:
        def build(tiles: TileWay | None, codes: bool) -> CompiledOperators:
            asked = tiles is None and grant.given and compiled
            return CompiledOperators(tiles="emulated" if asked else "none", codes=codes)

        monkeypatch.setattr(choose, "tile_grant", lambda: grant)
        monkeypatch.setattr(choose, "CompiledOperators", build)

    return grants


def linear_of(dtype: torch.dtype, quantization: str = "none", **how: bool) -> str:
    codes = None if quantization == "none" else quantization
    forms = frozenset() if codes is None else frozenset({WeightForm(codes)})
    return choose_ops(CPU, dtype, 2, 16, forms=forms, **how).linear(codes)


def test_tiles_are_used_if_they_are_granted(machine, caplog: pytest.LogCaptureFixture) -> None:
    machine(Grant(True))
    assert linear_of(torch.bfloat16) == "compiled, in tiles"
    assert linear_of(torch.bfloat16, "int8") == "int8, in tiles"
    assert linear_of(torch.float32, "int4") == "int4, in tiles"
    assert linear_of(torch.float32) == "compiled"
    machine(Grant(False))
    assert linear_of(torch.bfloat16) == "compiled"
    assert caplog.text == ""


def test_a_refusal_is_logged(machine, caplog: pytest.LogCaptureFixture) -> None:
    machine(REFUSED)
    with caplog.at_level(logging.WARNING):
        assert linear_of(torch.bfloat16) == "compiled"
    assert "Operation not permitted" in caplog.text


def test_a_compiler_that_is_too_old_is_named(machine, caplog: pytest.LogCaptureFixture) -> None:
    machine(Grant(True), compiled=False)
    assert linear_of(torch.bfloat16) == "compiled"
    assert "gcc 11" in caplog.text
    with pytest.raises(Unavailable, match=r"compiler is too old for; install gcc 11"):
        linear_of(torch.bfloat16, deterministic=True, tiles=True)


def test_deterministic_bits_follow_the_plan(machine) -> None:
    machine(Grant(True))
    assert linear_of(torch.bfloat16, deterministic=True, tiles=True) == "compiled, in tiles"
    assert linear_of(torch.bfloat16, deterministic=True, tiles=False) == "compiled"
    for grant, reason in ((Grant(False), "this CPU has none"), (REFUSED, "not permitted")):
        machine(grant)
        with pytest.raises(Unavailable, match=reason):
            linear_of(torch.bfloat16, deterministic=True, tiles=True)
        assert linear_of(torch.float32, deterministic=True, tiles=True) == "compiled"  # has the same bits


def test_the_doctor_prints_the_granted_tiles() -> None:
    assert doctor.tiles_text(Grant(True)) == "AMX, granted by the system"
    assert doctor.tiles_text(REFUSED).startswith("not used: the system refuses")
    assert doctor.tiles_text(Grant(False)) == "none known for this CPU"
