"""The command line that fetches files in small pieces, so that a small model's transfer can be cut in its middle:
`python -m tests.batchinfer.verbs.small_pieces pull org/name`."""

from __future__ import annotations

import os
import shutil

FREE = "SMALL_PIECES_FREE_BYTES"  # if it is set, every disk has so many left


def main() -> None:
    """As `batchinfer.cli.main`, in a process of its own."""
    from huggingface_hub import constants

    from batchinfer import cli

    constants.DOWNLOAD_CHUNK_SIZE = 4096
    if free := os.environ.get(FREE):
        used = shutil.disk_usage
        shutil.disk_usage = lambda path: used(path)._replace(free=int(free))  # type: ignore[assignment]
    cli.main()


if __name__ == "__main__":
    main()
