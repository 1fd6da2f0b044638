"""Edits of an input that make a run read it again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from batchinfer.input.files import list_inputs
from batchinfer.models.files.fingerprint import file_identity
from batchinfer.store.results.published_inputs import read_published_inputs, remember_inputs


def test_an_edit_with_the_old_size_and_time_is_read(tmp_path: Path) -> None:
    path, memory = tmp_path / "x.jsonl", tmp_path / "published.json"
    path.write_bytes(b'{"a": 1}\n')
    known = [{"sha256": "5"}]
    remember_inputs(memory, list_inputs(str(path), tmp_path), known)
    assert read_published_inputs(memory, list_inputs(str(path), tmp_path)) == known
    before, weights = path.stat(), file_identity(path)
    path.write_bytes(b'{"a": 2}\n')
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read_published_inputs(memory, list_inputs(str(path), tmp_path)) is None
    assert file_identity(path) != weights


def test_a_restored_file_is_read_again(tmp_path: Path) -> None:
    """Its inode changed, and its content must be compared."""
    path, memory = tmp_path / "x.jsonl", tmp_path / "published.json"
    path.write_bytes(b'{"a": 1}\n')
    remember_inputs(memory, list_inputs(str(path), tmp_path), [{"sha256": "5"}])
    shutil.copy2(path, tmp_path / "copy")
    os.replace(tmp_path / "copy", path)
    assert read_published_inputs(memory, list_inputs(str(path), tmp_path)) is None
