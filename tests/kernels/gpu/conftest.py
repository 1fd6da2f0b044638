"""Runs this folder's tests on the GPU if there is one, otherwise in the interpreter that tests/conftest.py
chose."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if HAS_TRITON else ["test_*.py"]


def _is_interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


DEVICE = "cpu" if not HAS_TRITON or _is_interpreted() else "cuda"


@pytest.fixture(scope="session")
def device() -> str:
    """The device of tensors."""
    return DEVICE


@pytest.fixture(scope="session")
def interpreted() -> bool:
    """True if kernels run in the interpreter."""
    return DEVICE == "cpu"


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, interpreted: bool) -> None:
    """Pretend that there are many processors, which splits sums, and poison results with NaN."""
    import torch

    from batchinfer_kernels.gpu import target

    empty = torch.empty

    def poisoned(*sizes: Any, **options: Any) -> Any:
        made = empty(*sizes, **options)
        return made.fill_(float("nan")) if made.is_floating_point() and made.element_size() > 1 else made

    monkeypatch.setattr(torch, "empty", poisoned)
    if interpreted:
        monkeypatch.setattr(target, "processors", lambda _device: 132)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore NumPy's warnings: the interpreter also computes masked lanes."""
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
