"""Names that people gave, as file names and as text: `file_name` alone makes the one, `visible` the other."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable

import xxhash

_LONGEST = 40
_OTHERS = re.compile(r"[^A-Za-z0-9_]+")
# Control characters, what changes the direction of text, halves of characters, and ends of lines.
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def file_name(name: str, number: int | None = None) -> str:
    """A part of a path for something that is called `name`: ASCII letters, digits, ``-`` and ``_``, at most 60.

    Parameters
    ----------
    number : int
        Of the thing among its like, which keeps apart names that look the same. Without one a name that cannot stand
        as it is is told from others by its hash.
    """
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    slug = _OTHERS.sub("-", plain).strip("-")[:_LONGEST]
    if number is not None:
        return f"{number:04d}-{slug}".rstrip("-")
    if slug and slug == name:
        return slug
    return f"{slug}-{xxhash.xxh3_64_hexdigest(name.encode(errors='surrogatepass'))[:8]}".lstrip("-")


def visible(text: str) -> str:
    """`text` for a terminal: characters that would act on it, or hide, are shown as Python writes them."""
    return "".join(map(_shown, text)) if not text.isprintable() else text


def as_html(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """What a notebook shows of an object: a title over names and values, escaped."""
    cells = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>" for name, value in rows)
    return f"<b>{html.escape(title)}</b><table>{cells}</table>"


def _shown(mark: str) -> str:
    return (
        mark if unicodedata.category(mark) not in _HIDDEN else mark.encode("unicode_escape", "surrogatepass").decode()
    )
