"""Tests the header parser: any bytes give tensors that fill the file exactly, or an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from batchinfer.core.errors import SecurityRefusal
from batchinfer.models.files.safetensors_header import DTYPE_BYTES, read_header

MIB = 2**20


def encode(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(start: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - start) // 4] if shape is None else shape,
        "data_offsets": [start, end],
    }


def test_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {"a": np.zeros((2, 3), np.float32), "b": np.ones((0, 4), np.float16), "c": np.array(3.0)}
    path.write_bytes(save(tensors, metadata={"format": "pt"}))
    found = read_header(path)
    assert {name: info.shape for name, info in found.items()} == {"a": (2, 3), "b": (0, 4), "c": ()}
    assert {name: info.dtype for name, info in found.items()} == {"a": "F32", "b": "F16", "c": "F64"}
    assert sum(info.nbytes for info in found.values()) == 24 + 8


MALFORMED: list[tuple[str, bytes, str]] = [
    ("empty file", b"", "ends after 0 of 8"),
    ("short length", b"\x01\x00", "ends after 2 of 8"),
    ("length beyond the file", (100).to_bytes(8, "little") + b"{}", "claims 100 bytes"),
    ("length of 2^64 - 1", b"\xff" * 8 + b"{}", "claims 18446744073709551615 bytes"),
    ("not UTF-8", encode(b"\xff\xfe"), "not JSON in UTF-8"),
    ("not JSON", encode(b"{"), "not JSON"),
    ("deep", encode(b"[" * MIB), "not JSON"),
    ("a list", encode([]), "not a JSON object"),
    ("duplicate name", encode(b'{"a": 1, "a": 2}'), "occurs twice"),
    ("metadata", encode({"__metadata__": {"a": 1}}), "__metadata__"),
    ("entry is a number", encode({"a": 1}), "needs exactly dtype, shape and data_offsets"),
    ("extra key", encode({"a": {**entry(0, 4), "x": 1}}, b"1234"), "needs exactly"),
    ("unknown dtype", encode({"a": entry(0, 4, dtype="F4")}, b"1234"), "unknown dtype 'F4'"),
    ("negative shape", encode({"a": entry(0, 4, [-1])}, b"1234"), "has the shape [-1]"),
    ("float shape", encode({"a": entry(0, 4, [1.0])}, b"1234"), "has the shape [1.0]"),  # type: ignore[list-item]
    ("wrong shape", encode({"a": entry(0, 4, [2])}, b"1234"), "does not fill"),
    ("huge shape", encode({"a": entry(0, 4, [2**62, 2**62])}, b"1234"), "does not fill"),
    ("backward", encode({"a": entry(4, 0, [0])}, b"1234"), "does not fill"),
    ("beyond the file", encode({"a": entry(0, 8)}, b"1234"), "fill 8 bytes, the file holds 4"),
    ("bytes left over", encode({"a": entry(0, 4)}, b"12345678"), "fill 4 bytes, the file holds 8"),
    ("hole", encode({"a": entry(0, 4), "b": entry(8, 12)}, b"1" * 12), "begins at byte 8, not 4"),
    ("overlap", encode({"a": entry(0, 8), "b": entry(4, 12)}, b"1" * 12), "begins at byte 4, not 8"),
    ("same place", encode({"a": entry(0, 4), "b": entry(0, 4)}, b"1234"), "begins at byte 0, not 4"),
]


@pytest.mark.parametrize(
    ("content", "message"), [case[1:] for case in MALFORMED], ids=[c[0] for c in MALFORMED]
)
def test_malformed(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(SecurityRefusal) as raised:
        read_header(path)
    assert raised.value.exit_code == 77
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


def test_header_over_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:  # sparse: 200 MB that take no room
        file.write((150_000_000).to_bytes(8, "little"))
        file.truncate(200_000_000)
    with pytest.raises(SecurityRefusal, match="at most 100000000 are read"):
        read_header(path)


def check_read(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        found = read_header(path)
    except SecurityRefusal:
        return
    for info in found.values():
        assert 0 <= info.start <= info.end <= len(content)
        assert info.nbytes == int(np.prod(info.shape, dtype=object)) * DTYPE_BYTES[info.dtype]


ANY_BYTES = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
OFFSET = st.integers(-1, 20) | st.integers() | st.floats()
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BYTES, "F4", ""]),
        "shape": st.lists(OFFSET, max_size=3),
        "data_offsets": st.lists(OFFSET, max_size=3),
    }
)


@given(
    st.dictionaries(st.text(max_size=5), ENTRY | st.none() | st.text(max_size=5), max_size=3),
    st.integers(0, 40),
)
@ANY_BYTES
def test_any_entries(tmp_path: Path, header: dict[str, Any], size: int) -> None:
    check_read(tmp_path / "x.safetensors", encode(header, b"\0" * size))


@given(st.data())
@ANY_BYTES
def test_flipped_bytes_of_a_real_file(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(save({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.int8)}))
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    check_read(tmp_path / "x.safetensors", bytes(content))
