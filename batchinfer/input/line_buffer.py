"""The part of a file of lines that is being looked at: whole lines, in bounded memory however long one is."""

from __future__ import annotations

from collections.abc import Iterator

_BLOCK = 1 << 18  # of bytes that are taken at once


class LineBuffer:
    """Bytes from `at`, where reading goes on, to `end`; up to `whole` they are whole lines. All are places in the file.

    `number` is that of the line at `at`. A file's last line needs no newline.
    """

    def __init__(self, chunks: Iterator[bytes], number: int = 1) -> None:
        self._chunks = chunks
        self._exhausted = False
        self.data = bytearray()
        self.base = 0  # the place of the first byte that is kept
        self.at = self.whole = 0
        self.number = number

    @property
    def end(self) -> int:
        return self.base + len(self.data)

    def fill(self) -> bool:
        """Read on; False when nothing is left to read."""
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
        """Return the end of the line at `at`: its newline, or the file's end; -1 for a line of more than `most` bytes;
        None at the file's end."""
        while self.whole <= self.at and self.end - self.at <= most:
            if not self.fill():
                return None
        if self.whole <= self.at:
            return -1
        end = self.data.find(b"\n", self.at - self.base)
        end = self.end if end < 0 else self.base + end
        return end if end - self.at <= most else -1

    def look_ahead(self, most: int) -> None:
        """Read on until `most` bytes from `at` on are there, or the file's end is."""
        while self.end - self.at < most and self.fill():
            pass

    def block_end(self, most_bytes: int, most_lines: int) -> int | None:
        """Return where the last whole line ends of those that are there, within so many bytes and lines from `at` on;
        None where the first one is longer."""
        start, whole = self.at - self.base, self.whole - self.base
        fits = whole - start <= most_bytes
        stop = whole if fits else self.data.rfind(b"\n", start, start + most_bytes) + 1
        while (count := self.data.count(b"\n", start, stop)) > most_lines:
            stop = self.data.rfind(b"\n", start, start + (stop - start) * most_lines // count) + 1
        return self.base + stop if stop > start else None

    def peek(self, stop: int) -> bytes:
        """The bytes up to `stop`."""
        with memoryview(self.data) as data:
            return bytes(data[self.at - self.base : stop - self.base])

    def take(self, stop: int, until: int) -> bytes:
        """The bytes up to `stop`; reading goes on at `until`."""
        taken = self.peek(stop)
        self.number += self.data.count(b"\n", self.at - self.base, until - self.base)
        self.at = min(until, self.end)
        return taken

    def skip_line(self) -> int:
        """Pass over the line at `at`, however long, without keeping it; how long it is."""
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
        """Up to where whole lines follow that hold no `mark`, in so far as they are there; at most a block of them."""
        start, most = self.at - self.base, min(self.whole - self.base, self.at - self.base + _BLOCK)
        found = -1 if mark is None else self.data.find(mark, start, most)
        stop = most if found < 0 else found
        if stop == self.whole - self.base:
            return self.whole
        return self.base + max(self.data.rfind(b"\n", start, stop) + 1, start)
