"""Leaves pandas out of batchinfer's own processes, which never use it.

pyarrow imports it, where it is installed, as soon as a Python value becomes a scalar or an array, to see whether it is
one of pandas': some 0.3 s and 40 MB of each process. A program that calls `batchinfer.run` keeps its pandas.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_ABSENT = "pandas"


class _WithoutPandas(PathFinder):
    """Finds what Python's own finder does, without pandas."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is, None for pandas."""
        return None if fullname == _ABSENT else super().find_spec(fullname, path, target)


def leave_pandas_out() -> None:
    """Have all imports of pandas in this process fail as if it were not installed."""
    sys.meta_path[:] = [_WithoutPandas if finder is PathFinder else finder for finder in sys.meta_path]
