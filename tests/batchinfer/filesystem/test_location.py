from __future__ import annotations

import os
from pathlib import Path

from batchinfer.filesystem.location import Location


def test_a_folder_lists_its_visible_files_below_it(tmp_path: Path) -> None:
    for name in ("b.csv", "a/c.csv", "a/.hidden.csv", ".git/d.csv", "a/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    place = Location.at(tmp_path)
    found = place.files_below(lambda name: name.endswith(".csv"))
    assert found == [place / "a/c.csv", place / "b.csv"]
    assert sorted(place.names()) == [".git", "a", "b.csv"]
    with found[0].open() as file:
        assert file.read() == b"a/c.csv"


def test_a_pattern_matches_files_only_and_names_what_was_meant(tmp_path: Path) -> None:
    (tmp_path / "tickets").mkdir()
    (tmp_path / "tickets/1.csv").write_text("")
    place = Location.at(tmp_path)
    assert (place / "*/*.csv").matching() == [place / "tickets/1.csv"]
    assert (place / "*").matching() == []
    assert ((place / "*").is_pattern, place.is_pattern) == (True, False)
    assert (place / "tikets/*.csv").nearest() == place / "tickets"
    assert (place / "elsewhere").nearest() is None


def test_only_regular_files_have_facts(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"four")
    os.mkfifo(tmp_path / "pipe")
    place = Location.at(tmp_path)
    facts = (place / "file").facts()
    assert (facts.size, facts.inode) == (4, (tmp_path / "file").stat().st_ino)
    assert ((place / "pipe").facts(), place.facts()) == (None, None)


def test_a_location_outside_of_the_base_stays_absolute(tmp_path: Path) -> None:
    place = Location.at(tmp_path) / "a/b.csv"
    assert place.relative_to(tmp_path) == "a/b.csv"
    assert place.relative_to(tmp_path / "a") == "b.csv"
    assert place.relative_to(tmp_path / "c") == str(tmp_path / "a/b.csv")
