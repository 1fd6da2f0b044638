"""The real engine with steps that take their roofline and free draft lookups.

The machine's speed does not decide which drafts are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchinfer.engine.config import LoadConfig

if TYPE_CHECKING:
    from batchinfer.engine.load.build import LoadedWeights

COSTED = "tests.batchinfer.costed_engine:build"


def build(config: LoadConfig, *beside: Any, **named: Any) -> LoadedWeights:
    """Load weights like batchinfer.engine.load.build.load_weights, without measured costs of drafts."""
    from batchinfer.engine.drafts import backoff, medusa, proposal_times, step_times
    from batchinfer.engine.load.build import load_weights

    backoff.SHARE = 1e9
    step_times.DraftedStepTimes.record_time = _unmeasured  # type: ignore[assignment,method-assign]
    proposal_times.ProposalTimes.record_time = _unmeasured  # type: ignore[assignment,method-assign]
    medusa.MedusaSource.record_time = _unmeasured  # type: ignore[assignment,method-assign]
    return load_weights(config, *beside, **named)


def _unmeasured(*_: Any) -> None:
    """Do not record the time of a step."""


@contextmanager
def known_peaks(folder: Path, flops_per_s: float = 1e12, bytes_per_s: float = 1e9) -> Iterator[None]:
    """Record these peaks for this machine within the block, like `doctor --measure`."""
    from batchinfer.machine.hardware import detect, remember
    from batchinfer_kernels.cpu.build import cache_folder

    compiled = cache_folder()  # else the operators would be compiled again
    compiled.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        cache_folder().parent.mkdir(parents=True, exist_ok=True)
        cache_folder().symlink_to(compiled)
        every = dict.fromkeys(("float32", "bfloat16"), flops_per_s)
        remember(detect("cpu").measured(every, bytes_per_s))
        yield
