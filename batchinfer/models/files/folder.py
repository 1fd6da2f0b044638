"""A checkpoint folder, which guarantees that no file is read from anywhere else."""

from __future__ import annotations

import stat
from pathlib import Path, PurePosixPath

from batchinfer.core.errors import SecurityRefusal
from batchinfer.core.hub import CONFIG
from batchinfer.core.model_links import model_roots, resolve_inside
from batchinfer.models.files.config_fields import checkpoint_error, load_json_object, shown

# Folders that transformers reads when it converts a tokenizer
FURTHER_TEMPLATES = ("additional_chat_templates",)
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


class CheckpointFolder:
    """A checkpoint folder that was checked to be safe to read. It contains only regular files, folders and links.

    Links lead to files in the folder, or in the folders that `model_roots` allows, such as the Hugging Face cache.
    """

    def __init__(self, path: Path) -> None:
        """Check the entries of a folder.

        Raises:
            JobFileError: `path` is not a folder.
            SecurityRefusal: A link points to a place that is not allowed, or an entry is neither a regular file nor a
                folder.
        """
        if not path.is_dir():
            what = "a file" if path.is_file() else "missing"
            raise checkpoint_error(path, f"{path} is {what}; a checkpoint folder with config.json is needed")
        self.path = path.resolve()
        self._roots = model_roots(self.path)
        for entry in sorted(self.path.iterdir()):
            self._check_entry(entry)
            if entry.name in FURTHER_TEMPLATES and entry.is_dir():
                for template in sorted(entry.iterdir()):
                    self._check_entry(template)

    def _check_entry(self, entry: Path) -> None:
        target = resolve_inside(entry, self._roots)
        if target.exists() and not (target.is_file() or target.is_dir()):
            raise _not_regular(entry)

    def file(self, name: str, named_by: str = "") -> Path | None:
        """Return the path of a file in the folder; None if it does not exist.

        Args:
            name: The file's path relative to the folder.
            named_by: The file of the checkpoint that states this name, for messages. Empty: no file does.

        Raises:
            SecurityRefusal: The name or a link points outside of the folder, or the entry is not a regular file.
        """
        if not _is_plain(name):
            raise SecurityRefusal(
                f"{self.path / named_by} names the file {shown(name)}; "
                "only files inside the checkpoint folder are read"
            )
        path = self.path / name
        target = resolve_inside(path, self._roots)
        if not target.exists():
            return None
        if not stat.S_ISREG(target.stat().st_mode):  # opening a pipe would hang
            raise _not_regular(path)
        return path

    def names(self, *suffixes: str) -> list[str]:
        """Return the names of the folder's entries that end with any of the suffixes, sorted."""
        return sorted(entry.name for entry in self.path.iterdir() if entry.name.endswith(suffixes))

    def refuse_model_code(self) -> None:
        """Raise SecurityRefusal if config.json states that the model needs Python code in the checkpoint.

        Call this only for unsupported models. batchinfer computes supported models without such code.
        """
        if self._asks_for_code(CONFIG):
            raise SecurityRefusal(
                f"{self.path / CONFIG} has an auto_map: the checkpoint wants its own Python code run, which batchinfer "
                "never does; use a checkpoint of an architecture that docs/models.md lists"
            )

    def refuse_tokenizer_code(self) -> None:
        """Raise SecurityRefusal if the tokenizer exists only as a Python class in the checkpoint."""
        name = self._names_tokenizer_class()
        if name is not None and self.file(TOKENIZER) is None:
            raise SecurityRefusal(
                f"{self.path / name} has an auto_map that names the tokenizer's own Python class, and there is no "
                f"{TOKENIZER}: batchinfer never runs a checkpoint's code; use a copy of the model with a {TOKENIZER}"
            )

    @property
    def unused_code(self) -> tuple[str, ...]:
        """Return (notice,) if the checkpoint has Python code for its tokenizer, which is not run; otherwise ()."""
        name = self._names_tokenizer_class()
        if name is None:
            return ()
        return (f"{name} names the tokenizer's own Python class, which is not run: {TOKENIZER} is used",)

    def _names_tokenizer_class(self) -> str | None:
        named = (name for name in (TOKENIZER_CONFIG, CONFIG) if self._asks_for_code(name, "AutoTokenizer"))
        return next(named, None)

    def _asks_for_code(self, name: str, of: str | None = None) -> bool:
        path = self.file(name)
        stated = load_json_object(path).get("auto_map") if path is not None else None
        return of in stated if of is not None and isinstance(stated, dict) else bool(stated)


def _not_regular(path: Path) -> SecurityRefusal:
    return SecurityRefusal(f"{path} is not a regular file; put a copy of the file there")


def _is_plain(name: str) -> bool:
    """Return True if a path is relative and printable, and has no ".." and no part of more than 255 bytes."""
    pure = PurePosixPath(name)
    harmless = name.isprintable() and "\\" not in name and not pure.is_absolute()
    return (
        harmless
        and bool(pure.parts)
        and all(part != ".." and len(part.encode()) <= 255 for part in pure.parts)
    )
