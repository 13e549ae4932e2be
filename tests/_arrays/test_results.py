"""A placement reports the spans and the cursor of a ring write, and results show themselves as text and as HTML."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from gleanrl._arrays.results import (
    BufferStats,
    Placement,
    RateCounts,
    html_table,
    laid_out,
    parts_text,
    text_table,
)


def test_a_write_that_fits_has_one_span():
    placement = Placement(start=3, num_steps=4, skipped=0, evicted=0, length=7, capacity=10)
    assert placement.spans() == ((3, 7),)
    assert not placement.wraps
    assert placement.cursor == 7


def test_write_that_ends_with_the_ring_has_one_span():
    placement = Placement(start=6, num_steps=4, skipped=0, evicted=0, length=10, capacity=10)
    assert placement.spans() == ((6, 10),)
    assert not placement.wraps
    assert placement.cursor == 0


def test_a_write_past_the_end_has_two_spans():
    placement = Placement(start=8, num_steps=5, skipped=0, evicted=3, length=10, capacity=10)
    assert placement.wraps
    assert placement.spans() == ((8, 10), (0, 3))
    assert placement.cursor == 3


def test_counters_print_on_lines_and_as_a_table():
    stats = BufferStats(3, 10, 4, 0, 0, rate_limiter=RateCounts(4, 2, 1))
    lines = repr(stats).splitlines()
    assert lines[:2] == ["BufferStats(", "    rows=3,"]
    assert lines[-2].startswith("    rate_limiter=RateCounts(") and lines[-1] == "    stored_apart=None)"
    assert stats._repr_html_().count("<tr>") == 1 + len(BufferStats._fields)


def test_nested_reprs_are_indented():
    inner = laid_out("Inner", ["a=1", "b=2"])
    assert parts_text("Outer", {"part": inner, "n": 3}).splitlines() == [
        "Outer(",
        "    part=Inner(",
        "        a=1,",
        "        b=2),",
        "    n=3)",
    ]


def test_columns_of_a_text_table_are_aligned():
    assert text_table(["key", "n"], [["a", 10], ["long\nkey", 1]]).splitlines() == [
        "key           n",
        "a            10",
        "'long\\nkey'   1",
    ]
    assert text_table(["key"], []) == "key"


HOSTILE = ["<script>alert(1)</script>", "a & b", "\"x' onload='y'", "</td></table>"]


@pytest.mark.parametrize("text", HOSTILE)
def test_each_text_of_an_html_table_is_escaped(text):
    html = html_table(text, [text], [[text], [text]])
    tags: list[str] = []
    texts: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            tags.append(tag)
            assert {name for name, _ in attrs} <= {"style"}

        def handle_data(self, data):
            texts.append(data)

    Reader().feed(html)
    assert tags == ["table", "caption", "thead", "tr", "th", "tbody", "tr", "td", "tr", "td"]
    assert texts == [text] * 4


def test_html_tables_take_their_colors_from_the_page():
    html = html_table("caption", ["a"], [["b"]])
    # Gray lines show on both white and black; any other fixed color would not.
    assert set(re.findall(r"#\w+|rgba?\([^)]*\)", html)) == {"rgba(128, 128, 128, 0.5)"}
    assert set(re.findall(r"(?<!-)color: (\w+)", html)) == {"inherit"}
