"""The command `pull`, which downloads a model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from batchinfer.cli.options import Json, Quiet
from batchinfer.cli.terminal import paint, say, say_json, tell_error
from batchinfer.core.errors import UsageError
from batchinfer.core.hub import ModelName
from batchinfer.core.wording import size
from batchinfer.pipeline.workers.interrupts import Interrupts

if TYPE_CHECKING:
    from batchinfer.verbs.pull import PulledModel


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="ORG/NAME[@REVISION]",
            help="The model on the hub, and a branch, tag or commit; `main` by default.",
        ),
    ],
    include: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="The GGUF file to download, if the repository has several or also safetensors: a pattern such as "
            "`*Q4_K_M*` for the whole file name.",
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> int:
    """Download a model into the Hugging Face cache, or continue a download. Jobs then name it as ORG/NAME."""
    from batchinfer.report.progress import Progress
    from batchinfer.verbs.pull import pull_model

    try:
        name = ModelName.parse(model)
    except ValueError as error:
        raise UsageError(f"{model} is not the name of a model: {error}") from error
    progress = Progress(sys.stderr, job=name.repo, quiet=quiet or as_json)
    with Interrupts().installed(), progress:
        pulled = pull_model(name, progress, include)
    code = 0 if pulled.problem is None else pulled.problem.exit_code
    if as_json:
        say_json(_facts(pulled, code))
    elif not quiet:
        say("\n".join(_lines(pulled)))
    if pulled.problem is not None:
        tell_error(f"{pulled.name} is downloaded, but cannot be run: {pulled.problem}")
    return code


def _lines(pulled: PulledModel) -> list[str]:
    sizes = f"{pulled.files} files, {size(pulled.bytes)}; {size(pulled.downloaded_bytes)} of weights downloaded now"
    named = [("folder", str(pulled.folder)), ("size", sizes)]
    if pulled.problem is None:
        name = pulled.name.repo.rpartition("/")[2]
        own = f"adapters: {{{name}: {pulled.path}}}" if pulled.is_adapter else f"path: {pulled.path}"
        named.append(("job file", f"model: {{{own}}}"))
    head = paint(f"{pulled.name.repo}@{pulled.commit}", "heading")
    return [head, *(paint(f"  {key:<9}", "quiet") + paint(text) for key, text in named)]


def _facts(pulled: PulledModel, code: int) -> dict[str, object]:
    return {
        "exit_code": code,
        "model": str(pulled.name),
        "commit": pulled.commit,
        "path": str(pulled.folder),
        "files": pulled.files,
        "bytes": pulled.bytes,
        "downloaded_bytes": pulled.downloaded_bytes,
        "message": None if pulled.problem is None else str(pulled.problem),
    }
