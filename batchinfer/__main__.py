"""Entry point of `batchinfer` and `python -m batchinfer`. Imports little before signals are handled."""

import gc
import os
import signal
import sys

# New objects before the garbage collector runs. With Python's default of 700 it runs 200 times during the imports,
# finds nothing, and takes a tenth of the time until the first row is read.
_COLLECT_AFTER = 50_000


def main() -> None:
    """Run the command line. Ctrl-C during the imports ends quietly."""
    _open_standard_streams()
    gc.set_threshold(_COLLECT_AFTER)
    try:
        _check_limits()
        from batchinfer.machine.absent_pandas import leave_pandas_out

        leave_pandas_out()
        from batchinfer.cli import main as run
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    try:
        run()
    except SystemExit as end:
        _leave(end)


def _leave(end: SystemExit) -> None:
    """End the process after flushing its output.

    Python would take 0.3 s to tear down libraries whose memory and threads the system frees anyway.
    """
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # closed before the start
                stream.flush()
    except OSError:  # the reader has gone: Python reports it with its own exit code
        raise end from None
    if not isinstance(end.code, int):
        raise end
    os._exit(end.code)


def _check_limits() -> None:
    """Exit with a message if system limits are too low. Later imports would end the process silently."""
    from batchinfer.core.errors import BatchInferError
    from batchinfer.machine.limits import check_limits

    try:
        check_limits()
    except BatchInferError as error:
        sys.stderr.write(f"batchinfer: {error}\n")
        sys.exit(error.exit_code)


def _open_standard_streams() -> None:
    """Reserve the numbers of closed standard streams (`>&-`), which the next opened file would get otherwise."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)


if __name__ == "__main__":
    main()
