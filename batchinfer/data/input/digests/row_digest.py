"""Digests of rows: rows with equal digests read alike, wherever they stand.

128 bits of BLAKE2b: no two different rows of all that anybody will ever have are taken for one another by accident. Of
a line of 60 bytes it takes 0.4 microseconds, of 300 bytes 0.7 (sha256: 0.5 and 1.1, without what a seed takes).
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

DIGEST_BYTES = 16
NO_DIGEST = bytes(DIGEST_BYTES)  # of a row that is never taken for another one


def row_digests(rows: Iterable[bytes | None], reading: object) -> bytes:
    """Return the digests of rows, end to end; None: a row that has none. `reading` is what else, beside a row's bytes,
    decides how it is read."""
    seeded = blake2b(repr(reading).encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES)
    found = []
    for row in rows:
        if row is None:
            found.append(NO_DIGEST)
        else:
            one = seeded.copy()
            one.update(b"\n")  # ends the seed
            one.update(row)
            found.append(one.digest())
    return b"".join(found)
