"""Tells errors that come of a lack of a device's memory from others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def lack_of_memory() -> Iterator[None]:
    """Raises torch.OutOfMemoryError for every error inside that comes of a lack of memory: the driver, Triton and the
    libraries have errors of their own for it, and that of a capture that was cut short hides it."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error comes of a lack of memory, be it by those in whose handling it came up."""
    return any(map(_says_so, _chain(error)))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and those in whose handling it came up."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _says_so(error: BaseException) -> bool:
    """Whether the error says that memory is out: cuBLAS by CUBLAS_STATUS_ALLOC_FAILED, the others in words."""
    known = isinstance(error, torch.OutOfMemoryError)
    return known or "out of memory" in str(error) or "ALLOC_FAILED" in str(error)
