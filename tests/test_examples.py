"""Tests that each run samples a thinned sweep evenly, and the slow run has the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

from tests.examples import spread
from tests.parts import divided

ROOT = Path(__file__).parents[1]

CASES = [f"test_it[{'-'.join(case)}]" for case in product("abcd", "wxyz", "12")]
SWEEP = """
import pytest

@pytest.mark.sample(3)
@pytest.mark.parametrize("slow", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("a", range(5))
def test_it(a, slow): ...

@pytest.mark.parametrize("a", range(5))
def test_whole(a): ...
"""
BETWEEN = "--- another run"
THRICE = f"""
import sys
import pytest
for at, marks in enumerate(((), ("-m", "not slow"), ("-m", "slow"))):
    print({BETWEEN!r} * bool(at))
    assert pytest.main([*sys.argv[1:], *marks]) == 0
"""


def test_a_sample_covers_the_maximum_number_of_values() -> None:
    for seed in map(str, range(20)):
        kept = spread(CASES, 4, seed)
        assert len(kept) == 4
        assert {part for case in kept for part in case[8:-1].split("-")} == set("abcdwxyz12")


def test_values_are_repeated_once_all_are_covered() -> None:
    kept = spread(CASES, 8, "0")
    assert [sum(value in case[8:] for case in kept) for value in "abcdwxyz"] == [2] * 8


def test_a_seed_gives_the_same_sample_for_any_order() -> None:
    samples = [spread(CASES, 4, str(seed)) for seed in range(20)]
    assert samples == [spread(CASES[::-1], 4, str(seed)) for seed in range(20)]
    assert len(set(map(frozenset, samples))) > 15
    assert spread(CASES, 100, "0") == set(CASES)


def test_every_case_is_in_the_sample_or_slow(tmp_path: Path) -> None:
    """As in `make test`, without marked cases that were slow before."""
    (tmp_path / "test_sweep.py").write_text(SWEEP)

    command = ["--collect-only", "-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest"]
    command += ["--rootdir", str(tmp_path), str(tmp_path)]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("BATCHINFER_TEST_")}
    done = subprocess.run(
        [sys.executable, "-c", THRICE, *command], cwd=ROOT, capture_output=True, text=True, env=plain
    )
    assert done.returncode == 0, done.stdout + done.stderr
    every, few, rest = (
        [line.partition("::")[2] for line in told.splitlines() if "::" in line]
        for told in done.stdout.split(BETWEEN)
    )
    assert len(every) == 15
    assert sorted(few + rest) == sorted(every)
    assert len([case for case in few if case.startswith("test_it")]) == 3
    assert all(case.endswith("-0]") for case in few if case.startswith("test_it"))
    assert len([case for case in few if case.startswith("test_whole")]) == 5


def test_parts_have_every_file_once_and_are_of_one_length() -> None:
    lengths = {f"test_{name}.py": 7 * at % 23 + 1 for at, name in enumerate("abcdefghijklmnopqrstuvwxyz")}
    parts = divided(lengths, 4)
    assert sorted(file for part in parts for file in part) == sorted(lengths)
    sizes = [sum(lengths[file] for file in part) for part in parts]
    assert max(sizes) - min(sizes) <= 3
    assert divided(dict(reversed(lengths.items())), 4) == parts
