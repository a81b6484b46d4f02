"""Compare the splitting of delimited text with plain Python."""

from __future__ import annotations

import csv
import io

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stratarec.data.sources import text as text_source
from stratarec.kernels import csv_records


@settings(deadline=None, max_examples=80)
@given(st.text(alphabet='a,"\n\r', max_size=24), st.booleans())
@example('"a"\rb\n', True)
@example('a""b\n"""",""\n', True)
def test_records_match_the_reference(text: str, quoted: bool) -> None:
    content = text.encode()
    actual = csv_records.split(np.frombuffer(content, np.uint8), ord(","), ord('"') if quoted else -1)
    expected = csv_records.reference_split(content, b",", b'"' if quoted else b"")
    assert [tuple(map(int, each)) for each in zip(*actual, strict=True)] == expected


CELL = st.text(alphabet='ab,"\n é', max_size=5)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(CELL, min_size=2, max_size=4), max_size=6))
def test_text_that_python_writes_has_no_errors(rows: list[list[str]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    result = csv_records.split(np.frombuffer(text.getvalue().encode(), np.uint8), ord(","), ord('"'))
    assert result.fields.tolist() == [len(row) for row in rows]
    assert not result.faults.any()


@settings(deadline=None, max_examples=250)
@given(st.text(alphabet='07,"+- \t\n.a', max_size=12), st.booleans())
@example("07", True)
@example("-07", True)
@example('"07",1\n', True)
def test_leading_zeros_match_the_reference(text: str, quoted: bool) -> None:
    quote = '"' if quoted else ""
    expected = text_source.reference_has_leading_zeros(text.encode(), b",", quote.encode())
    assert text_source.has_leading_zeros(text.encode(), ",", quote) == expected


def test_a_leading_zero_is_detected_anywhere_in_a_long_text() -> None:
    text = bytearray(b"10,0.5,a0\n" * 2000)
    assert not text_source.has_leading_zeros(bytes(text), ",", '"')
    for place in (10, 4090, 4100, 19990):
        assert text_source.has_leading_zeros(
            bytes(text[:place]) + b"07,1,a\n" + bytes(text[place:]), ",", '"'
        )
