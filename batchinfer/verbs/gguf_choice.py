"""Chooses which GGUF files of a repository to download. Most repositories have a dozen, and a job needs one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from batchinfer.core.errors import InputMissing
from batchinfer.core.gguf.files import is_model, parts_of
from batchinfer.core.hub import GGUF, PICKLE_SUFFIXES, ModelName

_LISTED = 12  # maximum number of files in a message
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")


def choose_gguf(name: ModelName, tree: Iterable[str], include: str | None) -> list[str]:
    """Choose the GGUF files of a hub repository to download: one model, which may consist of several files.

    Args:
        name: The name of the repository.
        tree: The names of its files.
        include: A shell pattern for whole file names, by which the user chooses, or None.

    Returns:
        The names of the files. Empty without `include` if the repository has no GGUF file, or also other weights.

    Raises:
        InputMissing: No model matches, several match, or a part of the model is missing.
    """
    names = sorted(tree)
    if include is None and any(each.endswith((".safetensors", *PICKLE_SUFFIXES)) for each in names):
        return []
    there = [each for each in names if each.endswith(GGUF) and is_model(each)]
    matching = [each for each in there if include is None or fnmatchcase(each, include)]
    models = sorted({_PART.sub("", each) for each in matching})
    if len(models) == 1:
        return _complete(name, matching, there)
    if include is None and not models:
        return []
    if not matching:
        raise InputMissing(f"no GGUF file of {name} matches {include}; {_listed(there)}")
    asked = "has several models in GGUF" if include is None else f"has several models that match {include}"
    raise InputMissing(f"{name} {asked}: {_listed(models)}; choose one, such as --include '{models[0]}'")


def _complete(name: ModelName, matching: list[str], there: list[str]) -> list[str]:
    wanted = sorted(set(parts_of(matching[0])))
    if missing := next((each for each in wanted if each not in there), None):
        raise InputMissing(f"{name} has {matching[0]}, and {missing}, another part of that model, is missing")
    return wanted


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}" if names else "it has none"
