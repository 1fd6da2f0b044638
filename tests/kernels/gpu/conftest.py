"""Chooses once where the kernels of this folder's tests run: on the GPU if there is one, else in the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.gpu import interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# While conftest is imported: kernels are interpreted or compiled by what holds when their module is imported
if DEVICE == "cpu":
    interpreter.switch_on()


@pytest.fixture(scope="session")
def device() -> str:
    """Where tensors have to be."""
    return DEVICE


@pytest.fixture(scope="session")
def interpreted() -> bool:
    """Whether kernels run in the interpreter."""
    return DEVICE == "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter computes masked lanes too, in NumPy, which warns of what they hold."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
