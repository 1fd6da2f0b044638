"""Reads a checkpoint's next layers into the page cache while a layer is encoded. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Condition, Thread

from batchinfer.core.hub import GGUF
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.checkpoint.stored_parts import StoredPart, StoredParts, bytes_of, slices_of
from batchinfer.models.files.safetensors_header import data_start
from batchinfer.models.parallel.shard import WHOLE_MODEL

PIECE_BYTES = 1 << 20  # bytes of a read, into memory that fits a CPU cache
AHEAD_BYTES = 512 << 20  # limit on the bytes that are read ahead
TABLES = -1  # the number of the tables, which come before the first layer
THREAD = "batchinfer-read-ahead"


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of bytes of a file.

    Args:
        file: The file.
        start: The first byte.
        end: The end (exclusive).
    """

    file: Path
    start: int
    end: int


# posix_fadvise would take three times the CPU time: it allocates pages of 4 KiB. It is also slower than the disk
class ReadAhead:
    """A thread that reads a checkpoint's files into the page cache, before the loader reads them."""

    def __init__(self, checkpoint: Checkpoint, parts: StoredParts | None = None) -> None:
        """Prepare to read a checkpoint. The thread starts with the call of `tables`.

        Args:
            checkpoint: The checkpoint.
            parts: The parts of stored tensors that a rank reads. None: all tensors.
        """
        self._checkpoint = checkpoint
        self._parts = parts or StoredParts(checkpoint, WHOLE_MODEL)
        self._starts: dict[Path, int] = {}
        self._changed = Condition()
        self._stopped = False
        self._wanted = TABLES  # the layer that was requested last
        self._thread: Thread | None = None

    def close(self) -> None:
        """Stop the thread. A read of up to PIECE_BYTES that is in progress is completed first."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def tables(self) -> None:
        """Start the thread. It reads the weights outside of layers, such as the embedding, and then layer by layer."""
        self._thread = Thread(target=self._read, name=THREAD, daemon=True)
        self._thread.start()

    def layer(self, index: int) -> None:
        """Note that the loader now reads the layer with number `index`, so the thread may read further layers."""
        with self._changed:
            self._wanted = index
            self._changed.notify_all()

    def ranges(self, index: int) -> Sequence[ByteRange]:
        """Return the byte ranges of files in which a layer is stored, sorted. Adjacent ranges are merged."""
        return self._ranges(self._parts.layer(index).values())

    def _ranges(self, parts: Iterable[StoredPart]) -> Sequence[ByteRange]:
        ranges = {each for part in parts for each in self._stored_ranges(part)}
        found = sorted(ranges, key=lambda each: (each.file, each.start))
        joined: list[ByteRange] = []
        for each in found:
            if joined and (joined[-1].file, joined[-1].end) == (each.file, each.start):
                joined[-1] = replace(joined[-1], end=each.end)
            else:
                joined.append(each)
        return joined

    def _stored_ranges(self, part: StoredPart) -> Iterator[ByteRange]:
        # The kernel's readahead would read a whole tensor for parts of each of its rows, so these are left out
        for name in part.names:
            if name not in self._checkpoint.tensors:
                continue
            tensor = self._checkpoint.tensors[name]
            within = bytes_of(tensor.info, slices_of(part.slices, name, tensor.info.shape))
            if within is not None:
                start = self._data_start(tensor.file) + tensor.info.start
                yield ByteRange(tensor.file, start + within[0], start + within[1])

    def _data_start(self, path: Path) -> int:
        if path.suffix == GGUF:
            return 0
        if path not in self._starts:
            self._starts[path] = data_start(path)
        return self._starts[path]

    def _read(self) -> None:
        # The page cache may be small, so only AHEAD_BYTES, or at least one layer, are read ahead of the loader
        sizes: list[int] = []  # bytes of the tables and of each layer so far
        for index in range(TABLES, len(self._parts.spec.layers)):
            of_tables = index == TABLES
            ranges = self._ranges(self._parts.tables().values()) if of_tables else self.ranges(index)
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._is_near(sizes))
                if self._stopped:
                    return
            sizes.append(sum(each.end - each.start for each in ranges))
            try:
                for each in ranges:
                    self._read_range(each, index)
            except OSError:  # the loader reads the bytes again, and reports the error
                return

    def _is_near(self, sizes: Sequence[int]) -> bool:
        ahead = sizes[self._wanted - TABLES + 1 :]
        return not ahead or sum(ahead) < AHEAD_BYTES

    def _read_range(self, wanted: ByteRange, index: int) -> None:
        piece = memoryview(bytearray(PIECE_BYTES))
        with wanted.file.open("rb", buffering=0) as file:
            file.seek(wanted.start)
            for at in range(wanted.start, wanted.end, PIECE_BYTES):
                if self._stopped or self._wanted > index:
                    return
                file.readinto(piece[: wanted.end - at])
