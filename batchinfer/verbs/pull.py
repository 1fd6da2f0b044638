"""Implements `batchinfer pull`: downloads the files of a model that a run reads into the Hugging Face cache."""

from __future__ import annotations

import fcntl
import glob
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from batchinfer.core.errors import (
    BatchInferError,
    InputMissing,
    JobFileError,
    Locked,
    SecurityRefusal,
    StorageError,
    Unavailable,
)
from batchinfer.core.gguf.files import gguf_files
from batchinfer.core.hub import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    CONFIG,
    HUB_PREFIX,
    PICKLE_SUFFIXES,
    WEIGHT_INDEX,
    WEIGHTS,
    ModelName,
    cache_folder,
    indexed_names,
    missing_files,
)
from batchinfer.filesystem.durable import check_free_space, storage
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.input.tokenizer.tokenizer_source import FILES as TOKENIZER_FILES
from batchinfer.models.adapters.stored_adapter import check_adapter_config
from batchinfer.models.files.config_fields import OLD_FILES
from batchinfer.models.files.sentence_modules import DENSE_FOLDERS, MODULES, POOLING_FOLDER, PROMPTS, TEXTS
from batchinfer.models.opening import open_checkpoint
from batchinfer.report.progress import Progress
from batchinfer.verbs.gguf_choice import choose_gguf
from batchinfer.verbs.transfer import Blob, Transfer

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

AT_ONCE = 4  # files in parallel; a hub serves one at about 100 MB/s
_SENTENCE_FILES = (
    *(MODULES, PROMPTS, TEXTS, f"{POOLING_FOLDER}/{CONFIG}"),
    *(f"{folder}/{file}" for folder in DENSE_FOLDERS for file in (CONFIG, WEIGHTS)),
)
SMALL_FILES = (
    CONFIG, ADAPTER, "generation_config.json", *OLD_FILES, WEIGHT_INDEX, *TOKENIZER_FILES, "chat_template.json",
    *_SENTENCE_FILES,
)  # fmt: skip
_LOOK_S = 0.1  # seconds between updates of the progress display
_CONTINUES = "the same command continues with the files that are there"


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A model or adapter that has been downloaded completely into the Hugging Face cache.

    Attributes:
        name: The name of the model.
        commit: The commit of its repository.
        folder: The folder of this commit in the cache.
        files: The number of its files.
        bytes: The size of its files.
        downloaded_bytes: The bytes of weights that this command downloaded.
        path: The value for `model.path` of a job: the model's name, or a file if the folder has several models.
        problem: Why batchinfer cannot run the model, or None.
        is_adapter: True for an adapter instead of a model.
    """

    name: ModelName
    commit: str
    folder: Path
    files: int
    bytes: int
    downloaded_bytes: int
    path: str
    problem: BatchInferError | None
    is_adapter: bool = False


def pull_model(name: ModelName, progress: Progress, include: str | None = None) -> PulledModel:
    """Download a model from the Hugging Face hub into the cache, or continue a download.

    Args:
        name: The name of the model.
        progress: The progress display.
        include: A pattern for the names of its GGUF files, or None.

    Raises:
        Unavailable: The hub cannot be reached, or the download failed.
        InputMissing: There is no such model, or it has no weights that could be run.
        SecurityRefusal: The weights are only stored as pickle.
        Locked: Another command downloads the model.
        StorageError: The cache cannot be written.
    """
    with _hub_errors(name):
        commit, tree = _listing(name)
        pull = _Pull(name, commit, tree, choose_gguf(name, tree, include))
        with pull.locked():
            return pull.complete(progress)


def _listing(name: ModelName) -> tuple[str, dict[str, RepoFile]]:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # failures are raised as errors; log lines would break the progress display
    api = HfApi(library_name="batchinfer")
    commit = api.model_info(name.repo, revision=name.revision).sha
    if commit is None:
        raise Unavailable(f"{_endpoint()} does not say which commit {name} is; is it a Hugging Face hub?")
    tree = [*api.list_repo_tree(name.repo, revision=commit, recursive=False)]
    for folder in (POOLING_FOLDER, *DENSE_FOLDERS):
        if any(entry.path == folder for entry in tree):
            tree += api.list_repo_tree(name.repo, folder, revision=commit)
    return commit, {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}


def _endpoint() -> str:
    from huggingface_hub.constants import ENDPOINT

    return str(ENDPOINT)


@dataclass(frozen=True, slots=True)
class _Pull:
    name: ModelName
    commit: str
    tree: dict[str, RepoFile]
    gguf: list[str]

    @property
    def entry(self) -> Path:
        """Return the folder of the repository in the cache, with all its commits."""
        return cache_folder() / (HUB_PREFIX + self.name.repo.replace("/", "--"))

    @property
    def snapshot(self) -> Path:
        """Return the folder of this commit in the cache."""
        return self.entry / "snapshots" / self.commit

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the repository in the cache during the `with` block, so that two commands do not write the same files.

        Raises:
            Locked: Another command has the lock.
        """
        path = self.entry / ".batchinfer-pull.lock"
        with storage(path, "open"):
            self.entry.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._lock(fd)
            yield
        finally:
            os.close(fd)

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Locked(
                f"another batchinfer pull of {self.name.repo} is running; try again later"
            ) from error

    def complete(self, progress: Progress) -> PulledModel:
        """Download the model, and let its revision, such as "main", refer to this commit in the cache.

        Args:
            progress: The progress display.
        """
        self._refuse_unusable()
        ref = self.entry / "refs" / self.name.revision
        if not ref.exists():
            self._refer(ref)  # makes an interrupted first download known by its name
        small = [
            name for name in SMALL_FILES if name in self.tree and not (self.gguf and name == WEIGHT_INDEX)
        ]
        progress.phase("listing")
        self._link(small)
        weights = self._weights()
        downloaded = self._download(weights, progress)
        self._link([*small, *weights])
        if missing := missing_files(self.snapshot):
            raise Unavailable(f"{missing[0]} of {self.name} did not arrive; {_CONTINUES}")
        self._refer(ref)
        total = sum(self.tree[file].size for file in (*small, *weights))
        path = self._path()
        count = len(small) + len(weights)
        named = str(self.name) if path == self.snapshot else str(path)
        return PulledModel(
            self.name,
            self.commit,
            self.snapshot,
            count,
            total,
            downloaded,
            named,
            _problem(path),
            self.is_adapter,
        )

    def _path(self) -> Path:
        # A folder with several GGUF models is ambiguous, so the path is the file
        if not self.gguf:
            return self.snapshot
        file = self.snapshot / self.gguf[0]
        try:
            alone = gguf_files(self.snapshot) == gguf_files(file)
        except JobFileError:  # several
            return file
        return self.snapshot if alone else file

    def _refuse_unusable(self) -> None:
        if self.gguf:
            return
        needed = (ADAPTER_WEIGHTS,) if self.is_adapter else (WEIGHTS, WEIGHT_INDEX)
        if CONFIG not in self.tree and not self.is_adapter:
            raise InputMissing(f"{self.name} has no {CONFIG}: it is no checkpoint in Hugging Face's format")
        if any(name in self.tree for name in needed):
            return
        if any(name.endswith(PICKLE_SUFFIXES) for name in self.tree):
            raise SecurityRefusal(
                f"{self.name} has its weights as pickle only, which can run code when loaded, and is not downloaded; "
                "look for a revision with safetensors, e.g. @refs/pr/1, or convert it"
            )
        raise InputMissing(f"{self.name} has no {' and no '.join(needed)}: no weights that could be run")

    @property
    def is_adapter(self) -> bool:
        """Return True if the repository has an adapter, but no model."""
        return ADAPTER in self.tree and not any(name in self.tree for name in (WEIGHTS, WEIGHT_INDEX))

    def _weights(self) -> list[str]:
        # Like loading, prefers a single file to an index
        if self.gguf:
            return self.gguf
        if self.is_adapter:
            return [ADAPTER_WEIGHTS]
        if WEIGHTS in self.tree:
            return [WEIGHTS]
        names = indexed_names(self.snapshot / WEIGHT_INDEX)
        if lost := [name for name in names if name not in self.tree]:
            raise InputMissing(
                f"{WEIGHT_INDEX} of {self.name} names {lost[0]}, which the model does not have"
            )
        if not names:
            raise InputMissing(f"{WEIGHT_INDEX} of {self.name} names no *.safetensors file")
        return names

    def _download(self, weights: list[str], progress: Progress) -> int:
        parts = [part for name in weights if (part := self._part(name)) is not None]
        there = sum(part.there() for part in parts)
        needed = sum(part.size for part in parts)
        needing = f"{cache_folder()}: the missing files of {self.name} need"
        check_free_space(self.entry, needed - there, needing, "set HF_HUB_CACHE to a folder on another disk")
        before = sum(self.tree[name].size for name in weights) - needed
        progress.downloading(before + there, before + needed)
        _transfer(parts, before, progress)
        return needed - there

    def _part(self, name: str) -> Blob | None:
        # None: the file exists, or is so small that it is stored in git
        from huggingface_hub import hf_hub_url

        file = self.tree[name]
        if file.lfs is None or (self.snapshot / name).exists():
            return None
        blob = self.entry / "blobs" / file.lfs.sha256
        if blob.exists():
            return None
        url = hf_hub_url(self.name.repo, name, revision=self.commit, endpoint=_endpoint())
        return Blob(name, url, blob, file.size)

    def _link(self, names: list[str]) -> None:
        # huggingface_hub downloads small files, and links the blobs of weights into the snapshot
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # not in its __all__

        disable_progress_bars()
        snapshot_download(
            self.name.repo, revision=self.commit, allow_patterns=[glob.escape(name) for name in names],
            cache_dir=cache_folder(), library_name="batchinfer", max_workers=AT_ONCE,
        )  # fmt: skip

    def _refer(self, ref: Path) -> None:
        if self.name.revision == self.commit:
            return
        with storage(ref, "write"):
            ref.parent.mkdir(parents=True, exist_ok=True)
            temporary = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
            temporary.write_text(self.commit)
            temporary.replace(ref)


def _transfer(parts: list[Blob], before: int, progress: Progress) -> None:
    # An error or signal stops all downloads, and keeps partial files
    transfer = Transfer()
    waiting = set(_started(transfer, parts))
    try:
        while waiting:
            done, waiting = wait(waiting, _LOOK_S)
            progress.received(before + sum(part.there() for part in parts))
            for one in done:
                one.result()
    except BaseException:
        transfer.stop()
        raise


def _started(transfer: Transfer, parts: list[Blob]) -> list[Future[None]]:
    # Daemon threads: a stalled connection blocks a thread for up to ten seconds, and Ctrl-C must not wait for it
    left: SimpleQueue[tuple[Blob, Future[None]]] = SimpleQueue()
    found: list[Future[None]] = []
    for part in parts:
        found.append(Future())
        left.put((part, found[-1]))
    for _ in range(min(AT_ONCE, len(parts))):
        threading.Thread(target=_fetch, args=(transfer, left), daemon=True, name="pull").start()
    return found


def _fetch(transfer: Transfer, left: SimpleQueue[tuple[Blob, Future[None]]]) -> None:
    with suppress(Empty):
        while True:
            part, future = left.get_nowait()
            try:
                transfer.fetch(part)
            except Exception as error:  # noqa: BLE001 - raised again by the caller that waits for the future
                future.set_exception(error)
            else:
                future.set_result(None)


def _problem(path: Path) -> BatchInferError | None:
    try:
        if path.is_dir() and not (path / CONFIG).exists() and (path / ADAPTER).exists():
            check_adapter_config(path)
            return None
        open_checkpoint(path)
        Tokenizer.load(path)
    except BatchInferError as error:
        return error
    return None


@contextmanager
def _hub_errors(name: ModelName) -> Iterator[None]:
    """Convert errors of the hub and of the network in the `with` block to BatchInferErrors with advice."""
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise Unavailable(
            "HF_HUB_OFFLINE is set, so nothing is downloaded; unset it to pull a model"
        ) from error
    except errors.GatedRepoError as error:
        raise Unavailable(
            f"{name.repo} is gated: accept its terms at {_endpoint()}/{name.repo}, and set HF_TOKEN to a token of "
            "that account"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputMissing(
            f"{name.repo} at {_endpoint()} has no branch, tag or commit {name.revision}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise InputMissing(
            f"there is no model {name.repo} at {_endpoint()}, or it is private; check the name, or set HF_TOKEN to a "
            "token that may read it"
        ) from error
    except errors.HfHubHTTPError as error:
        raise _answered(name, error.response.status_code, str(error)) from error
    except (httpx2.HTTPError, errors.LocalEntryNotFoundError) as error:
        raise Unavailable(f"{_endpoint()} cannot be reached: {error}; {_CONTINUES}") from error
    except OSError as error:
        if error.errno is None:  # huggingface_hub raises it for a truncated file
            raise Unavailable(f"the download of {name} failed: {error}; {_CONTINUES}") from error
        raise StorageError(f"{cache_folder()}: {error}; {_CONTINUES}") from error


def _answered(name: ModelName, status: int, words: str) -> BatchInferError:
    if status in (401, 403):
        return Unavailable(
            f"{_endpoint()} does not let you read {name.repo} ({status}); set HF_TOKEN to a token that may"
        )
    return Unavailable(f"{_endpoint()} answered {status}: {words}; {_CONTINUES}")
