"""`batchinfer` and `python -m batchinfer`: as little as possible before a signal means what it says."""

import gc
import os
import signal
import sys

# New objects after which the garbage collector looks for garbage. With Python's 700 it looks 200 times while the
# command is imported, finds nothing, and takes a tenth of the time until the first row is read.
_COLLECT_AFTER = 50_000


def main() -> None:
    """Run the command line. Ctrl-C while it is still being imported ends quietly, as later."""
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
    """End the process once all that was printed has gone out. Python would take 0.3 s to tear down libraries whose
    memory and threads the system takes back anyway."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # closed when the command was started
                stream.flush()
    except OSError:  # nobody reads them: Python says so, with an exit code of its own
        raise end from None
    if not isinstance(end.code, int):
        raise end
    os._exit(end.code)


def _check_limits() -> None:
    """Before libraries are imported that end the process without a word where the system allows them too little."""
    from batchinfer.core.errors import BatchInferError
    from batchinfer.machine.limits import check_limits

    try:
        check_limits()
    except BatchInferError as error:
        sys.stderr.write(f"batchinfer: {error}\n")
        sys.exit(error.exit_code)


def _open_standard_streams() -> None:
    """A standard stream that is closed (`>&-`) would lend its number to the next file that is opened."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)


if __name__ == "__main__":
    main()
