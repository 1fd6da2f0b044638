"""The dialect of a CSV file: its delimiters and quotes, as patterns over bytes.

Every pattern is possessive (`*+`): it never goes back, so it takes linear time and constant memory on any bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NEVER = re.compile(rb"(?!)")


@dataclass(frozen=True)
class CsvDialect:
    """One ASCII character stands between fields and one around those that hold it, doubled within; None: no quotes."""

    delimiter: str
    quote: str | None
    record: re.Pattern[bytes] = field(init=False)  # fields, from a record's start to where no more fit
    rest: re.Pattern[bytes] = field(init=False)  # the same from behind a quoted field
    records: re.Pattern[bytes] = field(init=False)  # whole records with their line ends, as many as there are
    within: re.Pattern[bytes] = field(init=False)  # from within quotes to the quote that closes them
    _cut: re.Pattern[str] = field(init=False)

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
            "_cut": re.compile(f"{d}({one})"),
        }
        for name, pattern in patterns.items():
            object.__setattr__(self, name, pattern)

    def opens(self, byte: int) -> bool:
        """Whether this byte is the quote."""
        return self.quote is not None and byte == ord(self.quote)

    def count(self, record: str) -> int:
        """How many fields a well-formed record has."""
        if self.quote is None or self.quote not in record:
            return record.count(self.delimiter) + 1
        return sum(1 for _ in self._cut.finditer(self.delimiter + record))

    def split(self, record: str) -> list[str]:
        """The fields of a well-formed record, without their quotes."""
        quote = self.quote
        if quote is None or quote not in record:
            return record.split(self.delimiter)
        return [self._bare(one, quote) for one in self._cut.findall(self.delimiter + record)]

    def _bare(self, written: str, quote: str) -> str:
        return written[1:-1].replace(quote * 2, quote) if written.startswith(quote) else written


def detected_delimiter(header: bytes, quote: str | None) -> str:
    """A comma, else a semicolon, else a tab, whichever the header line holds first in this order outside of quotes."""
    if quote is not None:
        q = re.escape(quote.encode())
        header = re.sub(rb"%b[^%b]*+(?:%b%b[^%b]*+)*+(?:%b|\Z)" % ((q,) * 6), b"", header)
    return next((mark for mark in (",", ";", "\t") if mark.encode() in header), ",")
