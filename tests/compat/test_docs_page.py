"""The page about other releases lists the names of the compatibility table."""

from __future__ import annotations

from pathlib import Path

from gleanrl.compat.docs_page import page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "names.md"


def test_the_page_is_made_of_the_table():
    assert PAGE.read_text() == page(), "write it anew: python -m gleanrl.compat.docs_page > docs/names.md"
