"""Tests that waiting threads can be switched to sleeping and spinning, by the CPU time of waiting."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from batchinfer_kernels.cpu.spinning import SpinControl
from tests.patience import PATIENCE_S

# A team of two threads works for a moment, then waits for 3 ms while the process sleeps; 20 times.
WAITING = """
import json, time, torch
from batchinfer_kernels.cpu.spinning import SpinControl

def waited():
    began = time.process_time()
    for _ in range(20):
        x.add_(1)
        time.sleep(0.003)
    return time.process_time() - began

torch.set_num_threads(2)
x, spinning = torch.ones(1 << 18), SpinControl()
waited()
found = [waited()]
spinning.shorten()
spinning.shorten()
found += [spinning.short, waited()]
spinning.lengthen()
spinning.lengthen()
print(json.dumps([*found, spinning.short, waited()]))
"""


def test_waiting_costs_time_only_while_spins_are_long() -> None:
    if "GOMP" not in torch.__config__.parallel_info() and not sys.platform.startswith("linux"):
        pytest.skip("this torch has no GNU OpenMP")
    usual = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-c", WAITING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True, env=usual)
    long, told, short, again, long_again = json.loads(done.stdout)
    print(f"CPU seconds of 0.06 s of waiting: {long:.3f}, {short:.3f}, {long_again:.3f}")
    assert (told, again) == (True, False)
    assert short < min(long, long_again) / 2


def test_without_the_runtime_nothing_happens() -> None:
    spinning = SpinControl()
    spinning._runtime = None
    spinning.shorten()
    assert not spinning.short
    spinning.lengthen()
