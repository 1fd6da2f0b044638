"""Counter-based random numbers: the same work gets the same draws in any batch and in any order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Philox-4x32-10 (Salmon et al., SC 2011). counter: (n, 4), key: (n, 2) → (n, 4), all uint32."""
    c0, c1, c2, c3 = (counter[:, i] for i in range(4))
    k0, k1 = key[:, 0], key[:, 1]
    for _ in range(10):
        p0, p1 = c0.astype(np.uint64) * _MULTIPLIERS[0], c2.astype(np.uint64) * _MULTIPLIERS[1]
        high0, low0 = (p0 >> _SHIFT).astype(np.uint32), (p0 & _LOW).astype(np.uint32)
        high1, low1 = (p1 >> _SHIFT).astype(np.uint32), (p1 & _LOW).astype(np.uint32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return np.stack((c0, c1, c2, c3), 1)


def uniforms(work_keys: list[bytes], positions: list[int], sample: int = 0) -> NDArray[np.float64]:
    """One uniform in [0, 1) with 53 bits for each (work key, sample, position).

    The first eight bytes of the work key are the generator's key, the next eight half of its counter. The job's
    seed and a row's occurrence are part of the work key already.
    """
    words = np.frombuffer(b"".join(k[:16] for k in work_keys), "<u4").reshape(-1, 4).astype(np.uint32)
    counter = np.empty((len(work_keys), 4), np.uint32)
    counter[:, 0] = positions
    counter[:, 1] = sample
    counter[:, 2:] = words[:, 2:]
    drawn = philox(counter, words[:, :2])
    high, low = drawn[:, 0].astype(np.uint64) >> np.uint64(5), drawn[:, 1].astype(np.uint64) >> np.uint64(6)
    return (high * np.uint64(1 << 26) + low).astype(np.float64) / float(1 << 53)
