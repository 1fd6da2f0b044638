"""The files of a checkpoint folder, none of which may lie anywhere else."""

from __future__ import annotations

import stat
from pathlib import Path, PurePosixPath

from batchinfer.core.errors import SecurityRefusal
from batchinfer.core.hub import CONFIG
from batchinfer.core.model_links import inside, model_roots
from batchinfer.models.files.config_fields import checkpoint_error, load_json_object, shown

FURTHER_TEMPLATES = (
    "additional_chat_templates",
)  # folders that transformers reads where it converts a tokenizer
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


class CheckpointFolder:
    """A folder whose files are regular files inside it, or where `model_roots` says that they may lie."""

    def __init__(self, path: Path) -> None:
        """Raises JobFileError when `path` is no folder, SecurityRefusal when an entry leads outside, or is neither a
        regular file nor a folder."""
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
        target = inside(entry, self._roots)
        if target.exists() and not (target.is_file() or target.is_dir()):
            raise _not_regular(entry)

    def file(self, name: str, named_by: str = "") -> Path | None:
        """The regular file of that name, None when there is none.

        `named_by` is the file that the name comes from, where it was not ours. Raises SecurityRefusal when
        the name or a link leads outside, or what is there is no regular file (opening a pipe would hang).
        """
        if not _is_plain(name):
            raise SecurityRefusal(
                f"{self.path / named_by} names the file {shown(name)}; "
                "only files inside the checkpoint folder are read"
            )
        path = self.path / name
        target = inside(path, self._roots)
        if not target.exists():
            return None
        if not stat.S_ISREG(target.stat().st_mode):
            raise _not_regular(path)
        return path

    def names(self, *suffixes: str) -> list[str]:
        """Names right in the folder that end so, sorted."""
        return sorted(entry.name for entry in self.path.iterdir() if entry.name.endswith(suffixes))

    def refuse_model_code(self) -> None:
        """Raises SecurityRefusal when config.json names a Python class of the checkpoint's own, for a model that
        nothing here can compute."""
        if self._asks_for_code(CONFIG):
            raise SecurityRefusal(
                f"{self.path / CONFIG} has an auto_map: the checkpoint wants its own Python code run, which batchinfer "
                "never does; use a checkpoint of an architecture that docs/models.md lists"
            )

    def refuse_tokenizer_code(self) -> None:
        """Raises SecurityRefusal when the tokenizer is a Python class of the checkpoint's own, and nothing else."""
        name = self._names_tokenizer_class()
        if name is not None and self.file(TOKENIZER) is None:
            raise SecurityRefusal(
                f"{self.path / name} has an auto_map that names the tokenizer's own Python class, and there is no "
                f"{TOKENIZER}: batchinfer never runs a checkpoint's code; use a copy of the model with a {TOKENIZER}"
            )

    @property
    def unused_code(self) -> tuple[str, ...]:
        """Return the notices about code that the checkpoint asks for and that is not run."""
        name = self._names_tokenizer_class()
        if name is None:
            return ()
        return (f"{name} names the tokenizer's own Python class, which is not run: {TOKENIZER} is used",)

    def _names_tokenizer_class(self) -> str | None:
        """The file that does."""
        named = (name for name in (TOKENIZER_CONFIG, CONFIG) if self._asks_for_code(name, "AutoTokenizer"))
        return next(named, None)

    def _asks_for_code(self, name: str, of: str | None = None) -> bool:
        """Whether the file maps anything, or the class `of`, to Python code of the checkpoint."""
        path = self.file(name)
        stated = load_json_object(path).get("auto_map") if path is not None else None
        return of in stated if of is not None and isinstance(stated, dict) else bool(stated)


def _not_regular(path: Path) -> SecurityRefusal:
    return SecurityRefusal(f"{path} is not a regular file; put a copy of the file there")


def _is_plain(name: str) -> bool:
    """Relative, printable, of bearable length, and without a step upwards."""
    pure = PurePosixPath(name)
    harmless = name.isprintable() and "\\" not in name and not pure.is_absolute()
    return (
        harmless
        and bool(pure.parts)
        and all(part != ".." and len(part.encode()) <= 255 for part in pure.parts)
    )
