"""The splitting of delimited text in plain Python."""

from __future__ import annotations

import re


def split(content: bytes, delimiter: bytes, quote: bytes) -> list[tuple[int, int, int, int]]:
    """End, line ends before, fields and fault of each whole record; see `Records`."""
    found, start = [], 0
    for match in re.finditer(b"\n", content):
        end = match.end()
        record = content[start:end]
        if not quote or record.count(quote) % 2 == 0:
            found.append((end, content.count(b"\n", 0, start), *_look(record, delimiter, quote)))
            start = end
    return found


def _look(record: bytes, delimiter: bytes, quote: bytes) -> tuple[int, int]:
    text = record[:-1].removesuffix(b"\r")
    fields, held = [], b""
    for part in text.split(delimiter):
        held = held + delimiter + part if held else part
        if not quote or held.count(quote) % 2 == 0:
            fields.append(held)
            held = b""
    if not text:
        return 0, 0
    whole = [not quote or quote not in field or _is_quoted(field, quote) for field in fields]
    bare = b"".join(field for field in fields if not quote or quote not in field)
    return len(fields), 0 if all(whole) and b"\r" not in bare else (1 if not all(whole) else 2)


def _is_quoted(field: bytes, quote: bytes) -> bool:
    if not (field.startswith(quote) and field.endswith(quote) and len(field) > 1):
        return False
    return quote not in field[1:-1].replace(quote * 2, b"")
