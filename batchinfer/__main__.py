"""`batchinfer` and `python -m batchinfer`: as little as possible before a signal means what it says."""

import os
import signal
import sys


def main() -> None:
    """Run the command line. Ctrl-C while it is still being imported ends quietly, as later."""
    _open_standard_streams()
    try:
        from batchinfer.cli import main as run
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    run()


def _open_standard_streams() -> None:
    """A standard stream that is closed (`>&-`) would lend its number to the next file that is opened."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)


if __name__ == "__main__":
    main()
