"""`batchinfer` and `python -m batchinfer`: as little as possible before a signal means what it says."""

import signal
import sys


def main() -> None:
    """Run the command line. Ctrl-C while it is still being imported ends quietly, as later."""
    try:
        from batchinfer.cli import main as run
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    run()


if __name__ == "__main__":
    main()
