"""What every test needs: no test may use more than its share of two cores."""

from __future__ import annotations

import os

# Before torch and OpenMP are imported anywhere: two test processes run beside each other, and threads of tiny
# operators that wait for one another cost ten times what they gain.
os.environ.setdefault("OMP_NUM_THREADS", "1")
