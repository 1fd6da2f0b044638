"""Announce when Triton compiles a kernel: in the middle of a job, a launch of a new specialisation may take long."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import triton


def announce_compilations(compiling: Callable[[], AbstractContextManager[object]]) -> None:
    """Enter `compiling()` for as long as Triton compiles a kernel in this process, from now on.

    Triton calls a hook before each compilation that is not in memory yet, and one after it, but none when the
    compilation fails: the context is then left before the next one is entered.
    """
    entered = ExitStack()

    def before(**_: object) -> bool:
        entered.close()
        entered.enter_context(compiling())
        return False  # Triton would not compile what its hook returns True for

    def after(**_: object) -> None:
        entered.close()

    triton.knobs.runtime.jit_cache_hook = before
    triton.knobs.runtime.jit_post_compile_hook = after
