"""Reads the next layers' bytes of a checkpoint while a layer is packed. No torch."""

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

PIECE_BYTES = 1 << 20  # that are read at once, into memory that stays in a cache
AHEAD_BYTES = 512 << 20
TABLES = -1  # what comes before the first layer
THREAD = "batchinfer-read-ahead"


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes of a file, end exclusive."""

    file: Path
    start: int
    end: int


class ReadAhead:
    """A thread that reads bytes before they are asked for, in the order in which they will be, and throws them away:
    whoever reads them next finds them in the page cache. It ends when it is closed.

    To read them takes a third of the CPU time of asking the system to do so (posix_fadvise), which reads into pages of
    4 KiB, and does not find the disk's full speed.
    """

    def __init__(self, checkpoint: Checkpoint, parts: StoredParts | None = None) -> None:
        """`parts`: those of a rank; None: all."""
        self._checkpoint = checkpoint
        self._parts = parts or StoredParts(checkpoint, WHOLE_MODEL)
        self._starts: dict[Path, int] = {}
        self._changed = Condition()
        self._stopped = False
        self._wanted = TABLES  # the layer that was asked for last
        self._thread: Thread | None = None

    def close(self) -> None:
        """End the thread, after at most the piece that it is reading."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def tables(self) -> None:
        """Have the tables read, and then the first layers."""
        self._thread = Thread(target=self._read, name=THREAD, daemon=True)
        self._thread.start()

    def layer(self, index: int) -> None:
        """Have what comes after this layer read."""
        with self._changed:
            self._wanted = index
            self._changed.notify_all()

    def ranges(self, index: int) -> Sequence[ByteRange]:
        """Return where a layer's tensors are, those that follow one another in a file as one."""
        return self._ranges(self._parts.layer(index).values())

    def _ranges(self, parts: Iterable[StoredPart]) -> Sequence[ByteRange]:
        ranges = {each for part in parts for each in self._stored(part)}
        found = sorted(ranges, key=lambda each: (each.file, each.start))
        joined: list[ByteRange] = []
        for each in found:
            if joined and (joined[-1].file, joined[-1].end) == (each.file, each.start):
                joined[-1] = replace(joined[-1], end=each.end)
            else:
                joined.append(each)
        return joined

    def _stored(self, part: StoredPart) -> Iterator[ByteRange]:
        """Yield where a parameter is read from. A part of each line of a tensor is left to whoever reads it: the system
        would read all of it ahead."""
        for name in part.names:
            if name not in self._checkpoint.tensors:
                continue
            tensor = self._checkpoint.tensors[name]
            within = bytes_of(tensor.info, slices_of(part.slices, name, tensor.info.shape))
            if within is not None:
                start = self._data_start(tensor.file) + tensor.info.start
                yield ByteRange(tensor.file, start + within[0], start + within[1])

    def _data_start(self, path: Path) -> int:
        """Return the byte of a file that the offsets of its tensors count from."""
        if path.suffix == GGUF:
            return 0
        if path not in self._starts:
            self._starts[path] = data_start(path)
        return self._starts[path]

    def _read(self) -> None:
        """Read all, but at most AHEAD_BYTES, or a layer, before they are asked for: the page cache may be small."""
        asked: list[int] = []  # the bytes of the tables and of each layer so far
        for index in range(TABLES, len(self._parts.spec.layers)):
            of_tables = index == TABLES
            ranges = self._ranges(self._parts.tables().values()) if of_tables else self.ranges(index)
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._is_near(asked))
                if self._stopped:
                    return
            asked.append(sum(each.end - each.start for each in ranges))
            try:
                for each in ranges:
                    self._read_range(each, index)
            except OSError:  # whoever needs the bytes reads them again, and says what is wrong with the file
                return

    def _is_near(self, asked: Sequence[int]) -> bool:
        ahead = asked[self._wanted - TABLES + 1 :]
        return not ahead or sum(ahead) < AHEAD_BYTES

    def _read_range(self, wanted: ByteRange, index: int) -> None:
        """Read a range of a layer, as long as none behind it is asked for."""
        piece = memoryview(bytearray(PIECE_BYTES))
        with wanted.file.open("rb", buffering=0) as file:
            file.seek(wanted.start)
            for at in range(wanted.start, wanted.end, PIECE_BYTES):
                if self._stopped or self._wanted > index:
                    return
                file.readinto(piece[: wanted.end - at])
