"""The verb of a machine that computes for a run elsewhere: worker."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from batchinfer.cli.options import Quiet
from batchinfer.cli.terminal import tell
from batchinfer.core.errors import UsageError
from batchinfer.pipeline.workers.interrupts import Interrupts


def worker(
    join: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the run listens: its job's engine.nodes.listen.")
    ],
    token_file: Annotated[
        Path, typer.Option(metavar="FILE", help="File with the secret that the run has, too.")
    ],
    wait: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="How long to wait for the run, or for a place in it."),
    ] = 300.0,
    quiet: Quiet = False,
) -> int:
    """Offer this machine to a run whose job has engine.nodes, until that run is over."""
    from batchinfer.machine.memory import available_memory
    from batchinfer.pipeline.workers.nodes.member import serve
    from batchinfer.pipeline.workers.nodes.offer import NodeOffer
    from batchinfer.pipeline.workers.nodes.token import read_token

    host, _, port = join.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UsageError(f"--join {join}: it must be HOST:PORT, such as 10.0.0.1:7700")
    offer = NodeOffer(socket.gethostname(), available_memory())
    with Interrupts("interrupted; the run loses this node").installed():
        serve((host, int(port)), read_token(token_file), offer, _silent if quiet else tell, wait)
    return 0


def _silent(_: str) -> None:
    """Print nothing, for --quiet."""
