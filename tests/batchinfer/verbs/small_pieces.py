"""The command line that fetches files in small pieces, so that a small model's transfer can be cut in its middle:
`python -m tests.batchinfer.verbs.small_pieces pull org/name`."""

from __future__ import annotations


def main() -> None:
    """As `batchinfer.cli.main`, in a process of its own."""
    from huggingface_hub import constants

    from batchinfer import cli

    constants.DOWNLOAD_CHUNK_SIZE = 4096
    cli.main()


if __name__ == "__main__":
    main()
