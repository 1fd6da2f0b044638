"""A window over a text file that finds whole lines in bounded memory, however long a line is."""

from __future__ import annotations

from collections.abc import Iterator

_BLOCK = 1 << 18  # bytes that `lines_without` returns at most


class LineBuffer:
    """A text file with a buffer of bytes around the reading position. All positions are byte offsets in the file.

    The last line of the file needs no newline.

    Attributes:
        data: The buffered bytes.
        base: The position of the first buffered byte.
        at: The reading position, at the start of a line.
        whole: The end of the last whole line in the buffer: between `at` and `whole` there are only whole lines.
        number: The number of the line at `at`.
    """

    def __init__(self, chunks: Iterator[bytes], number: int = 1) -> None:
        self._chunks = chunks
        self._exhausted = False
        self.data = bytearray()
        self.base = 0  # the position of the first buffered byte
        self.at = self.whole = 0
        self.number = number

    @property
    def end(self) -> int:
        """The position after the last buffered byte."""
        return self.base + len(self.data)

    def fill(self) -> bool:
        """Discard the bytes before the reading position and read the next chunk of the file. It may end within a line.

        Returns:
            False if the file has ended, and no line was added.
        """
        del self.data[: self.at - self.base]
        self.base = self.at
        if self._exhausted:
            return False
        chunk = next(self._chunks, None)
        if chunk is None:
            self._exhausted = True
            grown, self.whole = self.end > self.whole, self.end
            return grown
        newline = chunk.rfind(b"\n")
        if newline >= 0:
            self.whole = self.end + newline + 1
        self.data += chunk
        return True

    def line_end(self, most: int) -> int | None:
        """Return the end of the line at the reading position: the position of its newline, or the end of the file.

        Args:
            most: The maximum length of the line in bytes.

        Returns:
            The position; -1 if the line is longer than `most` bytes; None if the file has no further line.
        """
        while self.whole <= self.at and self.end - self.at <= most:
            if not self.fill():
                return None
        if self.whole <= self.at:
            return -1
        end = self.data.find(b"\n", self.at - self.base)
        end = self.end if end < 0 else self.base + end
        return end if end - self.at <= most else -1

    def look_ahead(self, most: int) -> None:
        """Read until `most` bytes after the reading position are buffered, or to the end of the file."""
        while self.end - self.at < most and self.fill():
            pass

    def block_end(self, most_bytes: int, most_lines: int) -> int | None:
        """Return where a block of whole lines ends that starts at the reading position. Only buffered lines are in it.

        Args:
            most_bytes: The maximum number of bytes of the block.
            most_lines: The maximum number of lines of the block. It may have fewer, even if more are buffered.

        Returns:
            A position in the file, or None if the first line is not buffered completely or exceeds `most_bytes`.
        """
        start, whole = self.at - self.base, self.whole - self.base
        fits = whole - start <= most_bytes
        stop = whole if fits else self.data.rfind(b"\n", start, start + most_bytes) + 1
        while (count := self.data.count(b"\n", start, stop)) > most_lines:
            stop = self.data.rfind(b"\n", start, start + (stop - start) * most_lines // count) + 1
        return self.base + stop if stop > start else None

    def peek(self, stop: int) -> bytes:
        """Return the bytes from the reading position to the position `stop`, without moving the reading position."""
        with memoryview(self.data) as data:
            return bytes(data[self.at - self.base : stop - self.base])

    def take(self, stop: int, until: int) -> bytes:
        """Return the bytes from the reading position to the position `stop`, and move on to the position `until`."""
        taken = self.peek(stop)
        self.number += self.data.count(b"\n", self.at - self.base, until - self.base)
        self.at = min(until, self.end)
        return taken

    def skip_line(self) -> int:
        """Skip the line at the reading position without buffering it, and return its length in bytes."""
        length, newline = 0, -1
        while (newline := self.data.find(b"\n", self.at - self.base)) < 0:
            length += self.end - self.at
            self.at = self.end
            if not self.fill():
                return length
        length += self.base + newline - self.at
        self.at, self.number = self.base + newline + 1, self.number + 1
        return length

    def lines_without(self, mark: bytes | None) -> int:
        """Return the end of the buffered lines that come before the first line with `mark`.

        At most 256 KiB after the reading position are searched.

        Args:
            mark: The bytes to search for. None to return the end of all searched lines.

        Returns:
            A position in the file. It is the reading position if the line there contains `mark`.
        """
        start, most = self.at - self.base, min(self.whole - self.base, self.at - self.base + _BLOCK)
        found = -1 if mark is None else self.data.find(mark, start, most)
        stop = most if found < 0 else found
        if stop == self.whole - self.base:
            return self.whole
        return self.base + max(self.data.rfind(b"\n", start, stop) + 1, start)
