"""Prevents importing pandas in batchinfer's own processes, which never use it.

pyarrow imports an installed pandas when it converts the first Python value, which costs about 0.3 s and 40 MB per
process. A program that calls `batchinfer.run` is not affected.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_ABSENT = "pandas"


class _WithoutPandas(PathFinder):
    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname == _ABSENT else super().find_spec(fullname, path, target)


def leave_pandas_out() -> None:
    """Make imports of pandas in this process fail as if it were not installed."""
    sys.meta_path[:] = [_WithoutPandas if finder is PathFinder else finder for finder in sys.meta_path]
