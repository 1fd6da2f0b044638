"""The loss of a calibrated model, as measured on rows that its calibration has not seen. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss by rounding: how the prediction of the next token changes at `tokens` positions of answers. `kl`: the
    mean of KL(before ‖ after) in nats; `same`: the share of positions with the same most likely token."""

    kl: float
    same: float
    tokens: int
