"""Every declared section of speed exists."""

from __future__ import annotations

import argparse

import pytest

from tests.speed import SECTIONS
from tests.suite.section import BenchSection, SuiteEntry
from tests.suite.worker import parts_of


@pytest.mark.parametrize("entry", SECTIONS, ids=lambda entry: entry.name)
def test_a_section_has_parts_by_its_default_options(entry: SuiteEntry) -> None:
    parser = argparse.ArgumentParser()
    for flags, settings in entry.options:
        parser.add_argument(*flags, **settings)
    section = BenchSection(False, 0.0, given=parser.parse_args([]))
    names = [name for name, _ in parts_of(entry.source, section)]
    assert len(names) == len(set(names)) > 0
