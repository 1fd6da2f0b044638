"""`python -m tests.batchinfer.cli.controlling MODULE …` runs `python -m MODULE …` with a controlling terminal."""

from __future__ import annotations

import fcntl
import runpy
import sys
import termios

if __name__ == "__main__":
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
