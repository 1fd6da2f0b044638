"""Operators compiled for Arm CPUs and emulated: compared with plain C, bit by bit if sums are exact."""

from __future__ import annotations

import itertools
import platform
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from batchinfer_kernels.cpu.build import ARM_FLAGS, CODES, FLAGS, FOLDER, SOURCES
from tests.patience import PATIENCE_S

CROSS = "aarch64-linux-gnu-gcc"
DRIVER = Path(__file__).parent / "cross" / "driver.c"
UNITS = ("bfloat16", "float32", "codes_bfloat16", "codes_float32")
# Compiler options, and a CPU of QEMU with exactly these instruction sets
KINDS = {
    "neon": (("-march=armv8-a",), "cortex-a72"),
    "sdot": (("-march=armv8.2-a+dotprod",), "neoverse-n1"),
    "bfmmla": (("-march=armv8.2-a+bf16",), "max"),
    "bfmmla and usmmla": (("-march=armv8.6-a+bf16+i8mm",), "max"),
    "emulated mmla": (("-march=armv8-a", "-DEMULATED_MMLA"), "cortex-a72"),
    "emulated tiles": (("-march=armv8-a", "-DEMULATED_TILES"), "cortex-a72"),
}
# The operators' flags, except for the CPU, and with faster compilation
COMMON = [flag for flag in FLAGS if not flag.startswith(("-O", "-march", "-mcpu")) and flag not in ARM_FLAGS]
# The cases that every test run contains
SAMPLES = (("bfmmla and usmmla", "bfloat16"), ("neon", "codes_bfloat16"))
needs_cross = pytest.mark.skipif(
    shutil.which(CROSS) is None, reason=f"{CROSS} is missing (apt install gcc-aarch64-linux-gnu)"
)


def build_driver(compiler: str, unit: str, options: tuple[str, ...], folder: Path) -> Path:
    program = folder / "driver"
    sources = [DRIVER, FOLDER / "shared.c"]
    if not unit.startswith("codes_"):  # units of quantised values contain attention
        sources.append(FOLDER / f"attention_{unit}.c")
    words = [f"-I{FOLDER}", f'-DUNIT="{unit}.c"', *map(str, sources), "-lm", "-o", str(program)]
    subprocess.run([compiler, "-O1", *COMMON, *options, *words], check=True, capture_output=True, text=True)
    return program


def passes(command: list[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PATIENCE_S, env={"OMP_NUM_THREADS": "2"}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "all checks passed" in done.stdout


needs_emulator = pytest.mark.skipif(
    shutil.which("qemu-aarch64") is None, reason="qemu-aarch64 is missing (apt install qemu-user)"
)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="options for x86-64")
@pytest.mark.slow
@pytest.mark.parametrize("unit", ["bfloat16", "codes_bfloat16"])
def test_the_emulated_checks_pass_on_this_machine(unit, tmp_path):
    """Other tests compare these operators with torch."""
    passes([str(build_driver("cc", unit, ("-march=native", "-DNO_TILES"), tmp_path))])


@needs_cross
@pytest.mark.parametrize("kind", KINDS)
def test_every_unit_is_c_that_the_compiler_for_arm_takes(kind):
    options, _ = KINDS[kind]
    command = [CROSS, "-fsyntax-only", "-Wall", "-Werror", *COMMON, *options, *map(str, (*SOURCES, *CODES))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[:2000]


@needs_cross
@needs_emulator
@pytest.mark.parametrize(
    ("kind", "unit"),
    [
        one if one in SAMPLES else pytest.param(*one, marks=pytest.mark.slow)
        for one in itertools.product(KINDS, UNITS)
    ],
)
def test_the_operators_are_right_on_arm(kind, unit, tmp_path):
    options, cpu = KINDS[kind]
    program = build_driver(CROSS, unit, (*options, "-static"), tmp_path)
    passes(["qemu-aarch64", "-cpu", cpu, str(program)])
    if (kind, unit) == SAMPLES[0]:
        done = subprocess.run(["qemu-aarch64", "-cpu", "neoverse-n1", str(program)], check=False)
        assert done.returncode == -signal.SIGILL  # the emulated CPU has exactly the instructions of its model


@needs_cross
@pytest.mark.parametrize(
    ("kind", "instruction", "unit"),
    [
        ("bfmmla and usmmla", "bfmmla", "bfloat16"),
        ("bfmmla and usmmla", "bfdot", "bfloat16"),
        ("bfmmla and usmmla", "usmmla", "float32"),
        ("sdot", "sdot", "float32"),
    ],
)
@pytest.mark.slow
def test_the_instructions_are_used(kind, instruction, unit):
    options, _ = KINDS[kind]
    command = [CROSS, "-O1", *COMMON, *options, "-S", "-o", "-", str(FOLDER / f"{unit}.c")]
    assert instruction in subprocess.check_output(command, text=True)
