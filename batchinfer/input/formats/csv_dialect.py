"""The dialect of a CSV file: its delimiter and quote character, as patterns over bytes.

All patterns are possessive (`*+`). They never backtrack, so they take linear time and constant memory on any bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NEVER = re.compile(rb"(?!)")


@dataclass(frozen=True)
class CsvDialect:
    """The delimiter and the quote character of a CSV file, and regular expressions that match its records.

    A field that contains a delimiter or newline is quoted, and quotes within it are doubled.

    Attributes:
        delimiter: A single ASCII character.
        quote: A single ASCII character, or None if fields are never quoted.
        record: Matches all fields of a record, or its fields up to the first syntax error.
        rest: Matches the fields of a record after a quoted field.
        records: Matches consecutive whole records with their line ends.
        within: Matches the text within a quoted field up to, but without, its closing quote.
    """

    delimiter: str
    quote: str | None
    record: re.Pattern[bytes] = field(init=False)
    rest: re.Pattern[bytes] = field(init=False)
    records: re.Pattern[bytes] = field(init=False)
    within: re.Pattern[bytes] = field(init=False)
    _field_pattern: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        d, q = re.escape(self.delimiter), re.escape(self.quote or "")
        within = f"[^{q}]*+(?:{q}{q}[^{q}]*+)*+"
        plain = rf"[^{d}{q}\r\n][^{d}\r\n]*+|"
        one = f"(?>{q}{within}{q}|{plain})" if self.quote else rf"[^{d}\r\n]*+"
        patterns = {
            "record": re.compile(f"{one}(?:{d}{one})*+".encode()),
            "records": re.compile(f"(?>{one}(?:{d}{one})*+\\r*+\\n)*+".encode()),
            "rest": re.compile(f"(?:{d}{one})*+".encode()),
            "within": re.compile(within.encode()) if self.quote else _NEVER,
            "_field_pattern": re.compile(f"{d}({one})"),
        }
        for name, pattern in patterns.items():
            object.__setattr__(self, name, pattern)

    def opens(self, byte: int) -> bool:
        """Return True if the byte is the quote character, which opens a quoted field."""
        return self.quote is not None and byte == ord(self.quote)

    def count(self, record: str) -> int:
        """Return the number of fields of a well-formed record."""
        if self.quote is None or self.quote not in record:
            return record.count(self.delimiter) + 1
        return sum(1 for _ in self._field_pattern.finditer(self.delimiter + record))

    def split(self, record: str) -> list[str]:
        """Return the fields of a well-formed record without their quotes."""
        quote = self.quote
        if quote is None or quote not in record:
            return record.split(self.delimiter)
        return [self._bare(one, quote) for one in self._field_pattern.findall(self.delimiter + record)]

    def _bare(self, written: str, quote: str) -> str:
        return written[1:-1].replace(quote * 2, quote) if written.startswith(quote) else written


def detect_delimiter(header: bytes, quote: str | None) -> str:
    """Detect the delimiter of a CSV file: comma, semicolon or tab. The first of these in the header is the delimiter.

    Delimiters within quotes do not count. A header without a delimiter gives a comma.

    Args:
        header: The first line of the file.
        quote: The quote character, or None if fields are not quoted.
    """
    if quote is not None:
        q = re.escape(quote.encode())
        header = re.sub(rb"%b[^%b]*+(?:%b%b[^%b]*+)*+(?:%b|\Z)" % ((q,) * 6), b"", header)
    return next((mark for mark in (",", ";", "\t") if mark.encode() in header), ",")
