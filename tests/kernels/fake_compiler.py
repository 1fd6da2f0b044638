"""A fake compiler that logs its calls and can be slow."""

from __future__ import annotations

from pathlib import Path

_SCRIPT = """#!/bin/sh
if [ "$1" = --version ]; then echo 1.0; exit; fi
echo begin >> {log}
sleep {seconds}
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo made > "$2"; fi; shift; done
echo end >> {log}
"""


def fake_compiler(folder: Path, seconds: float = 0.0) -> tuple[Path, Path]:
    """Return the path of a fake compiler for `CC`, and its log, with a line per start and per end of a call."""
    path, log = folder / "cc", folder / "cc.log"
    path.write_text(_SCRIPT.format(log=log, seconds=seconds))
    path.chmod(0o755)
    return path, log
