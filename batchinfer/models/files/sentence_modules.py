"""The layout of sentence-transformers: modules after a model, and prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.core.embedding import Dense
from batchinfer.core.hub import CONFIG
from batchinfer.core.sampling import Pooling
from batchinfer.models.files.config_fields import checkpoint_error, load_json_object, shown
from batchinfer.models.files.dense_modules import dense_module
from batchinfer.models.files.folder import CheckpointFolder

MODULES, PROMPTS, TEXTS = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
# The usual folders of the modules; modules.json names them, too
POOLING_FOLDER, DENSE_FOLDERS = "1_Pooling", ("2_Dense", "3_Dense")
_CONFIG = "config.json"
_MODE = "pooling_mode_"
_POOLINGS: Mapping[str, Pooling] = {
    "lasttoken": "last",
    "mean_tokens": "mean",
    "mean": "mean",
    "cls_token": "cls",
    "cls": "cls",
}
_KINDS = ("Transformer", "Pooling", "Dense", "Normalize")
_MOST_BYTES = 1 << 20
_KEY = "activation_fn"
_OLD_KEY = "sbert_ce_default_activation_function"  # before version 4


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """How sentence-transformers makes a vector from a checkpoint's hidden states, and the prompts that it suggests.

    Args:
        normalizes: True if vectors are scaled to length 1.
        mode: The pooling of hidden states, as the checkpoint names it.
        prompts: Texts to put before an input, such as "query: ", by name.
        default_prompt: The name of the prompt for inputs that name none. None: no prompt.
        pools_prompt: True if the tokens of the prompt are pooled, too.
        dense: The linear layers after the pooling, in order.
    """

    normalizes: bool
    mode: str
    prompts: Mapping[str, str]
    default_prompt: str | None
    pools_prompt: bool
    dense: tuple[Dense, ...] = ()

    @property
    def pooling(self) -> Pooling | None:
        """Return the pooling by the name that job files use; None if it is not supported."""
        return _POOLINGS.get(self.mode)


def sentence_modules(path: Path) -> SentenceModules | None:
    """Read the sentence-transformers files of a checkpoint. Returns None if it has no modules.json.

    Args:
        path: The folder of the checkpoint, or a GGUF file.

    Raises:
        JobFileError: A module is not supported.
        SecurityRefusal: A file is outside of the folder or malformed.
    """
    if path.is_file():  # a GGUF file
        return None
    folder = CheckpointFolder(path)
    file = folder.file(MODULES)
    if file is None:
        return None
    modules = _modules(file)
    kinds = [_kind(module) for module in modules]
    _check_kinds(path, kinds)
    if modules[0].get("path"):
        text = f"{MODULES} has the model in the folder {shown(modules[0]['path'])}"
        raise checkpoint_error(
            path, text, hint="name that folder in model.path, and embed.pooling in the job"
        )
    _check_texts(folder)
    pooling = _load(folder, f"{modules[1].get('path')}/{_CONFIG}")
    mode, prompts = _mode(folder, pooling), _load(folder, PROMPTS)
    texts = prompts.get("prompts") or {}
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise checkpoint_error(path, f"{PROMPTS} has prompts that are not texts by name")
    default = prompts.get("default_prompt_name")
    if default is not None and default not in texts:
        raise checkpoint_error(path, f"{PROMPTS} has the default prompt {shown(default)}, and no such prompt")
    places = (str(module.get("path")) for module, kind in zip(modules, kinds, strict=True) if kind == "Dense")
    dense = tuple(dense_module(folder, place, MODULES) for place in places)
    return SentenceModules(
        "Normalize" in kinds, mode, texts, default, bool(pooling.get("include_prompt", True)), dense
    )


def _check_kinds(path: Path, kinds: list[str]) -> None:
    unknown = [kind for kind in kinds if kind not in _KINDS]
    if unknown:
        text = f"{MODULES} has the module {unknown[0][:80]}, which is not computed; {', '.join(_KINDS)} are"
        raise checkpoint_error(path, text)
    between = kinds[2 : len(kinds) - (kinds[-1:] == ["Normalize"])]
    if kinds[:2] != [*_KINDS[:2]] or any(kind != "Dense" for kind in between):
        text = f"{MODULES} has the modules {', '.join(kinds)[:200] or 'none'}"
        order = "Transformer and Pooling, any number of Dense, and perhaps Normalize"
        raise checkpoint_error(path, f"{text}; computed are {order}, in this order")


def _modules(file: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(file.read_bytes()) if file.stat().st_size <= _MOST_BYTES else None
    except (ValueError, RecursionError) as error:
        raise checkpoint_error(file.parent, f"{MODULES} is not valid JSON: {shown(str(error))}") from error
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise checkpoint_error(file.parent, f"{MODULES} holds no list of modules")
    return found


def _kind(module: Mapping[str, Any]) -> str:
    return str(module.get("type")).rpartition(".")[2]


def _load(folder: CheckpointFolder, name: str, named_by: str = MODULES) -> dict[str, Any]:
    file = folder.file(name, named_by)
    return {} if file is None else load_json_object(file)


def _check_texts(folder: CheckpointFolder) -> None:
    if _load(folder, TEXTS).get("do_lower_case"):
        raise checkpoint_error(folder.path, f"{TEXTS} has do_lower_case, and texts are encoded as they are")


def _mode(folder: CheckpointFolder, pooling: Mapping[str, Any]) -> str:
    named = pooling.get("pooling_mode")
    found = [named] if isinstance(named, str) else [*named] if isinstance(named, list) else []
    found = found or [
        key.removeprefix(_MODE) for key, on in pooling.items() if key.startswith(_MODE) and on is True
    ]
    if len(found) != 1:
        text = f"its pooling has {len(found)} modes ({', '.join(map(str, found))}); computed is one"
        raise checkpoint_error(folder.path, text)
    return str(found[0])


def stated_activation(path: Path) -> str | None:
    """Return the class name of the activation that a reranker applies to its scores; None if no file names one.

    Args:
        path: The folder of the checkpoint, or a GGUF file.

    Raises:
        JobFileError: A file is not a JSON object.
        SecurityRefusal: A file is outside of the folder.
    """
    if path.is_file():  # a GGUF file
        return None
    folder = CheckpointFolder(path)
    own, config = (_load(folder, name, "") for name in (PROMPTS, CONFIG))
    newer = config.get("sentence_transformers")
    each = (own.get(_KEY), newer.get(_KEY) if isinstance(newer, dict) else None, config.get(_OLD_KEY))
    return next((str(one) for one in each if one is not None), None)
