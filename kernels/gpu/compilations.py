"""Announces compilations of Triton kernels, because a new specialisation can delay a launch in the middle of a job."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import triton


def announce_compilations(compiling: Callable[[], AbstractContextManager[object]]) -> None:
    """Call `compiling` before each compilation of a Triton kernel in this process, and enter the context it returns.

    The context is left when the compilation ends. If a compilation fails, Triton calls no hook: its context is left
    when the next one is entered.
    """
    entered = ExitStack()

    def before(**_: object) -> bool:
        entered.close()
        entered.enter_context(compiling())
        return False  # True would skip the compilation

    def after(**_: object) -> None:
        entered.close()

    triton.knobs.runtime.jit_cache_hook = before
    triton.knobs.runtime.jit_post_compile_hook = after
