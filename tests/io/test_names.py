"""Names as parts of paths, and as text on a terminal."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratarec.io.names import file_name, visible

NAMES = st.text(max_size=300)


@given(st.lists(NAMES, unique=True, max_size=20))
def test_any_names_become_distinct_parts_of_paths(names: list[str]) -> None:
    for found in ([file_name(name) for name in names], [file_name(name, i) for i, name in enumerate(names)]):
        assert len(set(found)) == len(names)
        for part in found:
            assert re.fullmatch(r"[A-Za-z0-9_-]{1,60}", part)
            assert os.path.basename(part) == part


@pytest.mark.parametrize(
    ("name", "alone", "numbered"),
    [
        ("demo", "demo", "0003-demo"),
        ("item_id", "item_id", "0003-item_id"),
        ("item category", r"item-category-[0-9a-f]{8}", "0003-item-category"),
        ("../../../evil", r"evil-[0-9a-f]{8}", "0003-evil"),
        ("café", r"cafe-[0-9a-f]{8}", "0003-cafe"),
        ("C*", r"C-[0-9a-f]{8}", "0003-C"),
        ("[", r"[0-9a-f]{8}", "0003"),
        ("-x", r"x-[0-9a-f]{8}", "0003-x"),
        ("x" * 200, "x{40}-[0-9a-f]{8}", "0003-x{40}"),
        ("", "[0-9a-f]{8}", "0003"),
    ],
)
def test_names_that_are_paths_are_what_they_were(name: str, alone: str, numbered: str) -> None:
    assert re.fullmatch(alone, file_name(name))
    assert re.fullmatch(numbered, file_name(name, 3))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, café 汉 [red]", "plain, café 汉 [red]"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("a\rb\nc\td\0", r"a\rb\nc\td\x00"),
        ("\x9b31m", r"\x9b31m"),
        ("evil\u202etxt.exe", r"evil\u202etxt.exe"),
        ("\u2066a\u2069 \u2028", r"\u2066a\u2069 \u2028"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_what_acts_on_a_terminal_is_shown(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text(st.characters()))
def test_shown_text_has_no_control_characters(text: str) -> None:
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", visible(text))
    assert visible(visible(text)) == visible(text)
