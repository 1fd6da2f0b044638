"""The command line with small download chunks, for interrupting the transfer of a small model:
`python -m tests.batchinfer.verbs.small_pieces pull org/name`.
"""

from __future__ import annotations


def main() -> None:
    from huggingface_hub import constants

    from batchinfer import cli

    constants.DOWNLOAD_CHUNK_SIZE = 4096
    cli.main()


if __name__ == "__main__":
    main()
